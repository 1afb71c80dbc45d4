"""Random walks over the integration: in whatever order things happen, a model without Residua computes what
it always did, one with Residua the same as in every other walk, and every dense call has its reason."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from residua import IntegrationError
from residua.hosts.diffusers import attached
from residua.hosts.diffusers.dispatch import LayerTag, _rebound

pytestmark = pytest.mark.slow

STEPS, LAYERS = 2, 2
SHAPES = {"plain": (1, 3, 16, 16), "wide": (1, 3, 16, 24), "batch": (2, 3, 16, 16), "small": (1, 1, 4, 4)}
DENSITIES = (0.22, 0.5)


class Stopped(Exception):
    """In the middle of a forward pass."""


class Walk(RuleBasedStateMachine):
    """One model. `Here` in the test adds what the fixtures make, and what is known from earlier walks."""

    tiny: Any
    scheduler: Any
    denoise: Any
    speed_up: Any
    folder: Any
    known: dict[Any, torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.model, self.inputs = self.tiny.build("wan")
        self.handle: Any = None
        self.density: float | None = None
        self.lora = self.had_lora = False
        self.born_with: set[Any] = set()

    def given(self, shape: str) -> dict[str, Any]:
        batch, frames, height, width = SHAPES[shape]
        return {
            "hidden_states": self.tiny.noise(batch, 16, frames, height, width),
            "timestep": torch.full((batch,), 500),
            "encoder_hidden_states": self.tiny.noise(batch, 12, 16),
        }

    def output(self, shape: str, model: Any = None) -> torch.Tensor:
        return self.denoise(model or self.model, self.given(shape), self.scheduler, STEPS)

    def check(self, shape: str, out: torch.Tensor, density: float | None) -> None:
        """Bit by bit what was computed before with this density (None: dense), adapter and shape."""
        wanted = self.known.setdefault((density, self.lora, shape), out)
        assert torch.equal(out, wanted) and bool(out.isfinite().all())

    def check_plain(self, model: Any, shape: str = "plain") -> None:
        assert attached(model) is None
        self.check(shape, self.output(shape, model), None)

    def check_clean(self) -> None:
        """Nothing of ours is on the model, but what a copy of an accelerated one was born with: marks that do
        nothing."""
        assert set(traces(self.model)) <= self.born_with
        assert not _rebound

    @initialize(density=st.sampled_from((*DENSITIES, None)))
    def begin(self, density: float | None) -> None:
        if density is not None:
            self.accelerate(density)

    @precondition(lambda self: self.handle is None)
    @rule(density=st.sampled_from(DENSITIES))
    def accelerate(self, density: float) -> None:
        self.handle, self.density = self.speed_up(self.model, density, scheduler=self.scheduler), density

    @precondition(lambda self: self.handle is not None)
    @rule(density=st.sampled_from(DENSITIES))
    def accelerate_again(self, density: float) -> None:
        with pytest.raises(IntegrationError, match="accelerated already"):
            self.speed_up(self.model, density, scheduler=self.scheduler)
        old = self.handle
        self.handle = self.speed_up(self.model, density, scheduler=self.scheduler, replace=True)
        self.density = density
        assert not old.active and self.handle.active

    @precondition(lambda self: self.handle is not None)
    @rule(shape=st.sampled_from(sorted(SHAPES)))
    def remove(self, shape: str) -> None:
        self.handle.remove()
        self.handle = self.density = None
        self.check_clean()
        self.check_plain(self.model, shape)

    @rule(shape=st.sampled_from(sorted(SHAPES)))
    def run(self, shape: str) -> None:
        if self.handle is not None:
            self.handle.clear()
        self.check(shape, self.output(shape), self.density)
        if self.handle is not None:
            layers = [layer for item in self.handle.report().transformers for layer in item.layers]
            assert len(layers) == LAYERS
            for layer in layers:
                assert all(reason.strip() and count > 0 for reason, count in layer.dense.items())
                assert layer.sparse + sum(layer.dense.values()) == 2 * STEPS  # two branches

    @rule(shape=st.sampled_from(sorted(SHAPES)), calls=st.integers(0, 2 * STEPS * LAYERS - 1))
    def stop_in_the_middle(self, shape: str, calls: int) -> None:
        seen = []

        def stop(*_: Any) -> None:
            seen.append(1)
            if len(seen) > calls:
                raise Stopped

        hooks = [block.ffn.register_forward_hook(stop) for block in self.model.blocks]
        with pytest.raises(Stopped):
            self.output(shape)
        for hook in hooks:
            hook.remove()
        if self.handle is not None:
            assert not self.handle.attachments[0].host.warm

    @precondition(lambda self: self.handle is not None)
    @rule()
    def reset(self) -> None:
        self.handle.reset()

    @rule(stay=st.booleans())
    def copy(self, stay: bool) -> None:
        twin = copy.deepcopy(self.model)
        self.check_plain(twin)
        if stay:
            self.go_on_with(twin)

    @precondition(lambda self: not self.had_lora)
    @rule(stay=st.booleans())
    def save_and_load(self, stay: bool) -> None:
        self.model.save_pretrained(self.folder)
        loaded = type(self.model).from_pretrained(self.folder)
        for weight in loaded.parameters():  # mapped from the file they are aligned, and rounded, differently
            weight.data = weight.data.clone()
        self.check_plain(loaded)
        if stay:
            self.go_on_with(loaded)

    def go_on_with(self, model: Any) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.check_clean()
        self.model, self.handle, self.density = model, None, None
        self.born_with = set(traces(model))

    @precondition(lambda self: not self.had_lora)
    @rule(shape=st.sampled_from(("plain", "wide")))
    def run_compiled(self, shape: str) -> None:
        """Compiled without a compiler: the same kernels, but calls that the graph cannot hold break it."""
        compiled = torch.compile(self.model, backend="eager", dynamic=False)
        self.check(shape, self.denoise(compiled, self.given(shape), self.scheduler, STEPS), self.density)
        torch._dynamo.reset()

    @rule(kind=st.sampled_from(("model", "sequential")), shape=st.sampled_from(sorted(SHAPES)))
    def run_offloaded(self, kind: str, shape: str) -> None:
        """The weights come and go with every forward pass."""
        accelerate = pytest.importorskip("accelerate")
        cpu = torch.device("cpu")
        if kind == "model":
            accelerate.cpu_offload_with_hook(self.model, execution_device=cpu)
        else:
            accelerate.cpu_offload(self.model, execution_device=cpu)
        self.check(shape, self.output(shape), self.density)
        accelerate.hooks.remove_hook_from_module(self.model, recurse=True)
        self.check(shape, self.output(shape), self.density)

    @rule(density=st.sampled_from(DENSITIES), shape=st.sampled_from(sorted(SHAPES)))
    def run_beside_another(self, density: float, shape: str) -> None:
        """A second model with other settings, in another thread at the same time."""
        twin, schedule = copy.deepcopy(self.model), copy.deepcopy(self.scheduler)
        other = self.speed_up(twin, density, scheduler=schedule)
        with ThreadPoolExecutor(1) as pool:
            its = pool.submit(self.denoise, twin, self.given("plain"), schedule, STEPS)
            self.check(shape, self.output(shape), self.density)
            self.check("plain", its.result(), density)
        other.remove()
        self.check_plain(twin)

    @rule()
    def switch_lora(self) -> None:
        peft = pytest.importorskip("peft")
        self.lora = not self.lora
        if self.had_lora:
            self.model.enable_adapters() if self.lora else self.model.disable_adapters()
            return
        self.had_lora = True
        lora = peft.LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights="gaussian")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model.add_adapter(lora)
        for name, weight in self.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(weight, 0.1)

    def teardown(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.check_clean()
        self.check_plain(self.model)


def traces(model: Any) -> list[Any]:
    """What of ours is still on the model."""
    own = [name for name in vars(model) if name in ("_residua", "cache_context", "_reset_stateful_cache")]
    processors = [module.processor for module in model.modules() if hasattr(module, "processor")]
    tags = [p for p in processors if isinstance(getattr(p, "_attention_backend", None), LayerTag)]
    return own + tags + list(model._forward_pre_hooks)


def test_random_walks(tiny, scheduler, denoise, speed_up, tmp_path):
    Here = type(
        "Here",
        (Walk,),
        {
            "tiny": tiny,
            "scheduler": scheduler,
            "denoise": staticmethod(denoise),
            "folder": tmp_path,
            "speed_up": staticmethod(speed_up),
            "known": {},
        },
    )
    few = settings(
        max_examples=10,
        stateful_step_count=8,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    run_state_machine_as_test(Here, settings=few)
    assert {density for density, _, _ in Here.known} > {None}  # some walks did run with Residua
