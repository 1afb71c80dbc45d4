"""One training run: recipe, models, averaged weights, optimisers."""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from residua.world.model import WorldModel, build_model, forward_tokens
from residua.world.pipeline import WorldPipeline
from residua.world.scenes import MAX_BALLS

from .batches import Batch, BatchShape, make_batch
from .clips import draw_clips
from .optim import Muon, fast_bfloat16
from .strips import HELD_OUT_SEED

# One ball: mostly many clips cut near the balls, mixed with whole frames and blocks of about as many tokens.
ONE_BALL_SHAPES = (
    BatchShape(16, "near", 160, 56),
    BatchShape(16, "crops", 192, 48),
    BatchShape(3, "frames", 1024),
    BatchShape(16, "near", 160, 56),
    BatchShape(16, "crops", 192, 48, num_frames=16),
    BatchShape(3, "blocks", 1024),
    BatchShape(16, "near", 160, 56, num_frames=64),
)
# Several balls: in every other step all tokens around the balls of a few frames, so that the tokens of a ball
# learn to agree on where it is.
MANY_BALL_SHAPES = (
    BatchShape(16, "near", 256, 104),
    BatchShape(16, "crops", 288, 112),
    BatchShape(16, "near", 256, 104, num_frames=64),
    BatchShape(3, "frames", 1024),
    BatchShape(16, "crops", 288, 112, num_frames=128),
    BatchShape(16, "near", 256, 104),
    BatchShape(16, "crops", 288, 112),
    BatchShape(3, "blocks", 1024),
    BatchShape(16, "crops", 288, 112, num_frames=16),
    BatchShape(16, "near", 256, 104, num_frames=128),
    BatchShape(16, "crops", 288, 112, num_frames=64),
)
# Long subsets and whole clips: attention learns to find its keys among as many as there are in sampling.
LONG_SHAPES = (
    BatchShape(1, "frames", 3072),
    BatchShape(1, "blocks", 3072),
    BatchShape(1, "all", num_frames=16),
    BatchShape(1, "blocks", 3072, num_frames=64),
    BatchShape(1, "all"),
    BatchShape(1, "blocks", 3072, num_frames=128),
)
# Nothing here betrays where the ball is: which tokens a step sees does not depend on its path.
_FAIR = (
    BatchShape(16, "spread", 192, 48, even=True),
    BatchShape(4, "blocks", 768, 256, even=True),
    BatchShape(3, "frames", 1024, 256, even=True),
    BatchShape(6, "spread", 512, 256, even=True),
    BatchShape(4, "blocks", 768, 256, even=True),
    BatchShape(1, "frames", 2304, 256),
    BatchShape(16, "spread", 192, 48, num_frames=64, even=True),
    BatchShape(4, "blocks", 768, 256, num_frames=16, even=True),
    BatchShape(3, "frames", 1024, 256, even=True),
    BatchShape(6, "spread", 512, 256, even=True),
    BatchShape(4, "blocks", 768, 256, even=True),
)
FAIR_SHAPES = (*_FAIR * 4, BatchShape(1, "all", num_frames=16))
VALIDATION_SHAPE = BatchShape(4, "frames", 1024)
VALIDATION_LEVELS = (0.6, 0.85, 1.0)
STATEFUL = ("model", "average", "adam", "muon")  # parts of a trainer that a checkpoint holds


@dataclass(frozen=True)
class Stage:
    """A number of steps on clips with one, two and three balls in these shares, cut into these shapes in
    turn."""

    steps: int
    balls: tuple[float, float, float]
    shapes: tuple[BatchShape, ...]


# The stages with more balls are part of the run that made the shipped weights, which draw one (README.md).
STAGES = (
    Stage(1200, (1.0, 0.0, 0.0), ONE_BALL_SHAPES),
    Stage(1200, (0.3, 0.45, 0.25), MANY_BALL_SHAPES),
    Stage(400, (0.35, 0.65, 0.0), MANY_BALL_SHAPES),
    Stage(1200, (1.0, 0.0, 0.0), ONE_BALL_SHAPES),
    Stage(40, (1.0, 0.0, 0.0), LONG_SHAPES),
    Stage(2960, (1.0, 0.0, 0.0), FAIR_SHAPES),
)
# Steps and factors of the learning rates, linear between them. The run was made in two legs: the second
# starts from the weights that the first one ended with.
RATES = ((0, 1 / 60), (59, 1.0), (2740, 1.0), (4040, 0.0), (4100, 0.5), (4300, 0.5), (5100, 0.35), (7000, 0.0))


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the result."""

    stages: tuple[Stage, ...] = STAGES
    seed: int = 0
    num_layers: int = 6
    muon_lr: float = 0.004
    adam_lr: float = 1e-3
    # Queries and keys are normalised: only the weights of these norms, which start at 1 and change by at most
    # the learning rate per step, can sharpen attention. In a run this short they need a faster rate.
    sharpness_factor: float = 3.0
    rates: tuple[tuple[int, float], ...] = RATES
    ema: float = 0.998
    shift: float = 3.0
    drop_prompt: float = 0.05
    validation_shape: BatchShape = VALIDATION_SHAPE

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> tuple[Stage, int]:
        """The stage of a step, and the step's number in it."""
        for stage in self.stages:
            if step < stage.steps:
                return stage, step
            step -= stage.steps
        raise IndexError(f"step {step} after the last")

    def rate_at(self, step: int) -> float:
        """Factor of the learning rates."""
        steps, factors = zip(*self.rates, strict=True)
        return float(np.interp(step, steps, factors))


class Trainer:
    """The state of a run: everything that a checkpoint holds."""

    def __init__(self, recipe: Recipe, compile_blocks: bool = False) -> None:
        self.recipe = recipe
        self.model = build_model(
            torch.Generator().manual_seed(recipe.seed),
            recipe.num_layers,
            max_balls=max(1 + i for i in range(MAX_BALLS) if recipe.stages[-1].balls[i]),
        )
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        transformer = self.model.transformer
        hidden = [p for name, p in transformer.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
        sharpness = [p for name, p in transformer.named_parameters() if ".norm_q." in name or ".norm_k." in name]
        taken = {id(p) for p in hidden + sharpness}
        rest = [p for p in self.model.parameters() if id(p) not in taken]
        self.muon = Muon(hidden)
        groups = [{"params": rest, "factor": 1.0}, {"params": sharpness, "factor": recipe.sharpness_factor}]
        self.adam = torch.optim.AdamW(groups, lr=recipe.adam_lr, betas=(0.9, 0.99), weight_decay=0.0)
        self.step = 0
        self.seconds = 0.0
        self.history: list[dict[str, float]] = []
        self.blocks: Sequence[Callable[..., Tensor]] | None = None
        if compile_blocks:
            self.blocks = [torch.compile(block, dynamic=False) for block in transformer.blocks]

    def start_from(self, folder: Path, step: int) -> None:
        """Take the weights of a folder as those after `step`; the optimisers start with nothing."""
        given = WorldPipeline.from_pretrained(str(folder), local_files_only=True)
        for model in (self.model, self.average):
            model.transformer.load_state_dict(given.transformer.state_dict())
            model.prompt_table.load_state_dict(given.prompt_table.state_dict())
        self.step = step

    def train_step(self) -> float:
        """One step of training; returns the loss."""
        recipe = self.recipe
        stage, number = recipe.stage_at(self.step)
        shape = stage.shapes[number % len(stage.shapes)]
        batch = make_batch(
            self.model.transformer,
            shape,
            draw_clips(recipe.seed, 16 * self.step, shape.clips, stage.balls),
            torch.Generator().manual_seed(recipe.seed * 1_000_003 + self.step),
            shift=recipe.shift,
            drop_prompt=recipe.drop_prompt,
        )
        prediction = predict(self.model, batch, self.blocks)
        error = (prediction - batch.clean).square().mean(dim=(1, 2))
        # The velocity loss of an x0 prediction, with its weight limited at low noise, where it would explode.
        loss = (error / batch.level.clamp_min(0.4).square()).mean()
        self.model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._update()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def _update(self) -> None:
        rate = self.recipe.rate_at(self.step)
        for group in self.adam.param_groups:
            group["lr"] = self.recipe.adam_lr * rate * group["factor"]
        self.adam.step()
        self.muon.step(self.recipe.muon_lr * rate)
        decay = min(self.recipe.ema, (1 + self.step) / (10 + self.step))
        values = [param.detach() for param in self.model.parameters()]
        torch._foreach_lerp_(list(self.average.parameters()), values, 1 - decay)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Error of the averaged weights on fixed clips at a few noise levels, without the first frames."""
        shape = self.recipe.validation_shape
        stage, _ = self.recipe.stage_at(max(0, self.step - 1))
        clips = draw_clips(HELD_OUT_SEED, 0, shape.clips, stage.balls)
        errors = {}
        for level in VALIDATION_LEVELS:
            batch = make_batch(
                self.average.transformer,
                shape,
                clips,
                torch.Generator().manual_seed(1),
                shift=self.recipe.shift,
                drop_prompt=0.0,
                level=level,
            )
            error = (predict(self.average, batch) - batch.clean)[~batch.given]
            errors[f"mse@{level}"] = error.square().mean().item()
        return errors

    def pipeline(self) -> WorldPipeline:
        """A pipeline around the averaged weights (not a copy)."""
        return WorldPipeline(
            transformer=self.average.transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=self.recipe.shift),
            prompt_table=self.average.prompt_table,
        )

    def export(self, folder: Path) -> None:
        """Write the averaged weights as a diffusers folder in half precision."""
        half = copy.deepcopy(self.average).half()
        pipeline = self.pipeline()
        pipeline.register_modules(transformer=half.transformer, prompt_table=half.prompt_table)
        pipeline.save_pretrained(folder, safe_serialization=True)

    def save(self, path: Path) -> None:
        """Write a checkpoint (atomically: an interrupted save leaves the previous one)."""
        state = {name: getattr(self, name).state_dict() for name in STATEFUL}
        state |= {"step": self.step, "seconds": self.seconds, "history": self.history}
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = torch.load(path, weights_only=True)
        for name in STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]


def predict(model: WorldModel, batch: Batch, blocks: Sequence[Callable[..., Tensor]] | None = None) -> Tensor:
    """Predicted clean tokens of a batch; matrix products in bfloat16 if that is faster."""
    context = model.prompt_table.encode(batch.scenes)
    with torch.autocast("cpu", torch.bfloat16, enabled=fast_bfloat16()):
        output = forward_tokens(model.transformer, batch.inputs(), batch.rope, batch.level * 1000, context, blocks)
    return output.float()
