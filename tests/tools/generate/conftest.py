"""A randomly initialised small pipeline of the world model and clips so small that they cost nothing."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("diffusers")
pytest.importorskip("av")
pytest.importorskip("jinja2")

from residua.config import Config
from residua.hosts import Settings
from residua.tools.generate.compare import compare
from residua.tools.generate.run import Request
from residua.world.held_out import DEMO_PROMPT as PROMPT
from residua.world.pipeline import WorldPipeline
from tests.support.tiny_world import tiny_world


@pytest.fixture(scope="session")
def pipe() -> WorldPipeline:
    return tiny_world()


@pytest.fixture(scope="session")
def weights(pipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture
def request_small() -> Request:
    return Request(PROMPT, seed=1, steps=3, height=16, width=16, frames=8)


@pytest.fixture
def settings() -> Settings:
    return Settings(Config(density=0.4, backend="torch"), dense_steps=1, dense_layers=1, min_tokens=0)


@pytest.fixture(scope="session")
def comparison(pipe):
    return compare(
        pipe,
        "world",
        Request(PROMPT, seed=1, steps=3, height=16, width=16, frames=8),
        Settings(Config(density=0.4, backend="torch"), dense_steps=1, dense_layers=1, min_tokens=0),
        lpips="no weights here",
        watch=lambda name: lambda done, total: None,
        repeats=2,
    )
