"""A small pipeline of the world model with random weights, and suites that cost next to nothing."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # the other tests beside it would have all of the cores
pytest.importorskip("diffusers")
pytest.importorskip("av")
pytest.importorskip("jinja2")
pytest.importorskip("ray")
pytest.importorskip("pyarrow")

from residua.tools.evaluate.prompts import Prompt
from residua.tools.evaluate.suite import DENSE, NOISE_FLOOR, Generation, Setting, Suite, Workers
from residua.world.held_out import TUNING_PROMPTS
from tests.support.tiny_world import tiny_world


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    tiny_world().save_pretrained(folder)
    return folder


@pytest.fixture
def make_suite(weights):
    """A suite of so many prompts; keywords go over what it has."""

    def make(prompts: int | list[str] = 2, seeds=(0,), noise_floor: bool = False, **changes) -> Suite:
        texts = TUNING_PROMPTS[:prompts] if isinstance(prompts, int) else prompts
        sparse = {"density": 0.4, "min_tokens": 0, "dense_steps": 0, "dense_layers": 0}
        settings = [
            Setting(DENSE),
            *([Setting(NOISE_FLOOR)] if noise_floor else []),
            Setting("anchored", {"method": "anchored", **sparse}),
            Setting("paper", {"method": "paper", **sparse}),
        ]
        plain = {
            "model": str(weights),
            "prompts": tuple(map(Prompt, texts)),
            "seeds": tuple(seeds),
            "settings": tuple(settings),
            "work": Workers(device="cpu", workers=2, threads=1),
            "generation": Generation(steps=2, height=16, width=16, frames=8),
        }
        return Suite(**{**plain, **changes})

    return make
