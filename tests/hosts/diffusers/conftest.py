"""Shared by the tests of the diffusers integration: tiny models, a denoising loop, and settings that fit
them."""

import importlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
diffusers = pytest.importorskip("diffusers")
diffusers.utils.logging.set_verbosity_error()

from residua import Config  # noqa: E402
from residua.hosts.diffusers import Handle, accelerate  # noqa: E402

STEPS = 4


@pytest.fixture(autouse=True)
def same_backend_afterwards() -> Iterator[None]:
    """`set_attention_backend` of a model also changes the default of the whole process."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    before = registry._active_backend
    yield
    registry._active_backend = before


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    return importlib.import_module("tests.support.tiny_models")


@pytest.fixture(scope="session")
def pipes() -> ModuleType:
    return importlib.import_module("tests.support.tiny_pipelines")


class FakeScheduler:
    """What a pipeline's scheduler shows: a schedule that is new in each run, and the step."""

    def __init__(self) -> None:
        self.step_index: int | None = None
        self.timesteps: torch.Tensor | None = None

    def set_timesteps(self, steps: int) -> None:
        self.timesteps, self.step_index = torch.linspace(1000, 1, steps), None


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


def run(model: Any, inputs: dict[str, Any], scheduler: FakeScheduler, steps: int = STEPS) -> torch.Tensor:
    """A denoising loop with two guidance branches; every output of the model, stacked."""
    scheduler.set_timesteps(steps)
    outputs = []
    with torch.no_grad():
        for step in range(steps):
            for branch in ("cond", "uncond"):
                outputs.append(forward(model, inputs, branch))
            scheduler.step_index = step + 1
    return torch.stack(outputs)


def forward(model: Any, inputs: dict[str, Any], branch: str = "cond") -> torch.Tensor:
    if hasattr(model, "cache_context"):
        with model.cache_context(branch):
            out = model(**inputs)[0]
    else:
        out = model(**inputs)[0]
    return out[0] if isinstance(out, list) else out


@pytest.fixture
def denoise() -> Any:
    return run


@pytest.fixture
def one_pass() -> Any:
    return forward


TINY = Config(
    query_groups=8, kv_groups=24, probes=6, kmeans_cold=4, metric_rows=64, key_rank=8, query_rank=8, residual_rank=4
)


@pytest.fixture
def speed_up() -> Iterator[Callable[..., Handle]]:
    """`accelerate` with settings that make 192 tokens worth routing: one dense step, no dense layer."""
    handles = []

    def sparse(target: Any, density: float = 0.22, **changes: Any) -> Handle:
        settings = {"config": TINY, "dense_steps": 1, "dense_layers": 0, "min_tokens": 0, **changes}
        handles.append(accelerate(target, density, **settings))
        return handles[-1]

    yield sparse
    for handle in handles:
        handle.remove()
