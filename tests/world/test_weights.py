"""The weights in the package: their files, and that they are of a trained model. Clips are short: what the
model is worth is measured by `training.evaluate`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from residua.world import WEIGHTS, load_pipeline, scenes
from residua.world.held_out import DEMO_PROMPT, REPORT_PROMPTS, SEEDS, SETS, TUNING_PROMPTS
from residua.world.renderer import render_video

MAX_BYTES = 25e6


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pipeline():
    pytest.importorskip("diffusers")
    pipeline = load_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_files_are_small_readable_and_run_nothing() -> None:
    files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)
    assert (Path(WEIGHTS).parent / "MODEL_CARD.md").is_file()


def test_tokens_and_heads(pipeline) -> None:
    config = pipeline.transformer.config
    assert config.attention_head_dim == 128
    _, height, width = config.patch_size
    per_frame = (64 // height) * (64 // width)
    assert [frames * per_frame for frames in (32, 64, 128)] == [8_192, 16_384, 32_768]
    assert config.rope_max_seq_len >= 128
    assert pipeline.transformer.dtype == torch.float32


def test_first_frame_is_kept_and_the_ball_moves(pipeline) -> None:
    scene = scenes.parse_prompt(DEMO_PROMPT)
    truth = (render_video(scene, scenes.default_layout(scene), 8, 64, 64) + 1) / 2
    truth = truth.permute(1, 2, 3, 0).numpy()
    clip = pipeline(DEMO_PROMPT, num_frames=8, num_inference_steps=4, generator=seeded()).frames[0]
    assert np.isfinite(clip).all()
    assert np.square(clip[0] - truth[0]).mean() < 0.003
    # The last frame resembles the true one more than it resembles a ball that stayed where it was.
    assert np.square(clip[-1] - truth[-1]).mean() < 0.5 * np.square(clip[-1] - truth[0]).mean()


def test_what_was_never_trained_is_refused(pipeline) -> None:
    assert pipeline.prompt_table.config["max_balls"] == 1
    two = "a red rubber ball dropped and a blue clay ball dropped on a sand floor at noon"
    with pytest.raises(scenes.PromptError, match="2 balls, at most 1"):
        pipeline(two, num_frames=1, num_inference_steps=1)


def test_held_out_scenes_are_disjoint_known_and_varied(pipeline) -> None:
    most = pipeline.prompt_table.config["max_balls"]
    assert len(REPORT_PROMPTS) >= 16 and SEEDS.keys() == SETS.keys()
    assert len({*TUNING_PROMPTS, *REPORT_PROMPTS, DEMO_PROMPT}) == len(TUNING_PROMPTS + REPORT_PROMPTS) + 1
    for prompts in SETS.values():
        found = [scenes.parse_prompt(prompt, most) for prompt in prompts]
        assert {scene.floor for scene in found} == set(scenes.FLOORS)
        assert {scene.time for scene in found} == set(scenes.TIMES)
        assert {ball.colour for scene in found for ball in scene.balls} == set(scenes.COLOURS)
        motions = {ball.motion for scene in found for ball in scene.balls}
        assert motions == set(scenes.MOTIONS) - {"resting"}
        layouts = [scenes.default_layout(scene) for scene in found]
        assert len(set(layouts)) == len(layouts)
