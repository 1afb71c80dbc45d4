"""The columns of the physics of a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("diffusers")

from residua.tools.evaluate.physics import PIPELINE, physics_columns
from residua.tools.evaluate.rows import Row
from residua.world.held_out import DEMO_PROMPT
from residua.world.renderer import render_video
from residua.world.scenes import default_layout, parse_prompt

ROW = Row("id", DEMO_PROMPT, "ball", "", None, 0, "balanced", "id", "clip.mp4")


@pytest.fixture(scope="module")
def clip():
    scene = parse_prompt(DEMO_PROMPT)
    return ((render_video(scene, default_layout(scene), 4, 64, 64) + 1) / 2).permute(1, 2, 3, 0).numpy()


def test_a_clip_is_compared_with_the_simulator_and_with_the_dense_clip(clip):
    found = physics_columns(PIPELINE, ROW, clip, clip)
    assert found["physics_dense_error"] == 0 and 0 < found["physics_error"] < 0.1 and found["physics_kept"]


def test_with_an_image_nothing_is_said_about_the_simulator(clip):
    found = physics_columns(PIPELINE, replace(ROW, image="first.png"), clip, clip)
    assert found["physics_error"] is None and found["physics_dense_error"] == 0 and found["physics_kept"]


def test_other_models_and_prompts_have_no_physics(clip):
    assert physics_columns("WanPipeline", ROW, clip, clip) == {}
    assert physics_columns(PIPELINE, replace(ROW, prompt="a cat"), clip, clip) == {}
