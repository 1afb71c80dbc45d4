"""One training run: recipe, models, averages, optimisers; a step at a time."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from .batches import Batch, BatchShape, make_batch
from .model import MiniModel, build_model, forward_tokens
from .optim import Muon
from .pipeline import MiniVideoPipeline

# Many clips where it matters, between other cuts of about as many tokens: whole frames, blocks, whole clips.
MAIN_SHAPES = (
    BatchShape(16, "near", 256),
    BatchShape(4, "frames", 1024),
    BatchShape(16, "near", 256),
    BatchShape(4, "blocks", 1024),
    BatchShape(16, "near", 256, num_frames=16),
    BatchShape(2, "all", num_frames=8),
    BatchShape(16, "near", 256, num_frames=64),
)
# Long subsets and whole clips: attention learns to find its keys among as many as it meets when sampling.
FINAL_SHAPES = (
    BatchShape(1, "frames", 3072),
    BatchShape(1, "blocks", 3072),
    BatchShape(1, "all", num_frames=16),
    BatchShape(1, "blocks", 3072, num_frames=64),
    BatchShape(1, "all"),
)
VALIDATION_SHAPE = BatchShape(6, "frames", 1024)
VALIDATION_LEVELS = (0.6, 0.85, 1.0)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the result."""

    steps: int = 1500
    seed: int = 0
    num_layers: int = 6
    muon_lr: float = 0.004
    adam_lr: float = 1e-3
    # Queries and keys are normalised: only the weights of these norms, which start at 1 and change by at most
    # the learning rate per step, can sharpen attention. In a run this short they need a faster rate.
    sharpness_factor: float = 3.0
    warmup: int = 60
    ema: float = 0.998
    shift: float = 3.0
    two_objects: float = 0.0
    drop_prompt: float = 0.05
    final_share: float = 0.05
    main_shapes: tuple[BatchShape, ...] = MAIN_SHAPES
    final_shapes: tuple[BatchShape, ...] = FINAL_SHAPES
    validation_shape: BatchShape = VALIDATION_SHAPE

    def shape_at(self, step: int) -> BatchShape:
        """What the step looks at."""
        first_final = round(self.steps * (1 - self.final_share))
        if step < first_final:
            return self.main_shapes[step % len(self.main_shapes)]
        return self.final_shapes[(step - first_final) % len(self.final_shapes)]

    def rate_at(self, step: int) -> float:
        """Factor of the learning rates: warm-up, then linearly to zero."""
        return min(1.0, (step + 1) / self.warmup) * (1 - step / self.steps)


class Trainer:
    """The state of a run: all that a checkpoint holds."""

    def __init__(self, recipe: Recipe, compile_blocks: bool = False) -> None:
        self.recipe = recipe
        self.model = build_model(
            torch.Generator().manual_seed(recipe.seed),
            recipe.num_layers,
            max_objects=2 if recipe.two_objects else 1,
        )
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        transformer = self.model.transformer
        hidden = [
            p for name, p in transformer.named_parameters() if name.startswith("blocks.") and p.ndim == 2
        ]
        sharpness = [
            p for name, p in transformer.named_parameters() if ".norm_q." in name or ".norm_k." in name
        ]
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

    def train_step(self) -> float:
        """One step of training; returns the loss."""
        recipe = self.recipe
        batch = make_batch(
            self.model.transformer,
            recipe.shape_at(self.step),
            torch.Generator().manual_seed(recipe.seed * 1_000_003 + self.step),
            shift=recipe.shift,
            two_objects=recipe.two_objects,
            drop_prompt=recipe.drop_prompt,
        )
        prediction = predict(self.model, batch, self.blocks)
        error = (prediction - batch.clean).square().mean(dim=(1, 2))
        # The velocity loss of an x0 prediction, its weight bounded where little noise would make it explode.
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
        """Error of the averaged weights on fixed clips at a few noise levels, first frames left out."""
        shape = self.recipe.validation_shape
        errors = {}
        for level in VALIDATION_LEVELS:
            batch = make_batch(
                self.average.transformer,
                shape,
                torch.Generator().manual_seed(1),
                shift=self.recipe.shift,
                two_objects=self.recipe.two_objects,
                drop_prompt=0.0,
                level=level,
            )
            error = (predict(self.average, batch) - batch.clean)[~batch.given]
            errors[f"mse@{level}"] = error.square().mean().item()
        return errors

    def pipeline(self) -> MiniVideoPipeline:
        """A pipeline around the averaged weights (not a copy)."""
        return MiniVideoPipeline(
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

    def start_from(self, pipeline: MiniVideoPipeline) -> None:
        """Take over trained weights; optimisers and schedule start anew."""
        for model in (self.model, self.average):
            model.transformer.load_state_dict(pipeline.transformer.state_dict())
            model.prompt_table.load_state_dict(pipeline.prompt_table.state_dict())

    def save(self, path: Path) -> None:
        """Write a checkpoint (atomically: an interrupted save leaves the previous one)."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "adam": self.adam.state_dict(),
            "muon": self.muon.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.adam.load_state_dict(state["adam"])
        self.muon.load_state_dict(state["muon"])
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]


def predict(model: MiniModel, batch: Batch, blocks: Sequence[Callable[..., Tensor]] | None = None) -> Tensor:
    """Predicted clean tokens of a batch; matrix products in bfloat16, the rest in float32."""
    context = model.prompt_table.encode(batch.scenes)
    with torch.autocast("cpu", torch.bfloat16):
        output = forward_tokens(
            model.transformer, batch.inputs(), batch.rope, batch.level * 1000, context, blocks
        )
    return output.float()
