"""The columns of the physics of a row."""

import pytest

pytest.importorskip("diffusers")

from residua.tools.metrics.physics import PIPELINE, clip_physics
from residua.world.held_out import DEMO_PROMPT
from residua.world.renderer import render_video
from residua.world.scenes import default_layout, parse_prompt


@pytest.fixture(scope="module")
def clip():
    scene = parse_prompt(DEMO_PROMPT)
    return ((render_video(scene, default_layout(scene), 4, 64, 64) + 1) / 2).permute(1, 2, 3, 0).numpy()


def test_a_clip_is_compared_with_the_simulator_and_with_the_dense_clip(clip):
    found = clip_physics(PIPELINE, DEMO_PROMPT, True, clip, clip).columns()
    assert found["physics_dense_error"] == 0 and 0 < found["physics_error"] < 0.1 and found["physics_kept"]


def test_with_an_image_nothing_is_said_about_the_simulator(clip):
    found = clip_physics(PIPELINE, DEMO_PROMPT, False, clip, clip).columns()
    assert found["physics_error"] is None and found["physics_dense_error"] == 0 and found["physics_kept"]


def test_other_models_and_prompts_have_no_physics(clip):
    assert clip_physics("WanPipeline", DEMO_PROMPT, True, clip, clip) is None
    assert clip_physics(PIPELINE, "a cat", True, clip, clip) is None
