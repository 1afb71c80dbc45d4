"""Clips and token subsets."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("diffusers")

from dev.training.batches import BatchShape, choose_tokens, make_batch, near_tokens
from dev.training.clips import draw_clips
from residua.world.model import IN_CHANNELS, build_model, condition_channels, to_tokens
from residua.world.renderer import render_video

MIXED = (0.3, 0.3, 0.4)
OPTIONS = {"shift": 3.0, "drop_prompt": 0.0}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_clips_have_numbers() -> None:
    clips = draw_clips(0, 256, 20, MIXED)
    part = draw_clips(0, 260, 4, MIXED)
    assert part.scenes == clips.scenes[4:8]
    assert torch.equal(part.paths.position, clips.paths.position[4:8])
    assert draw_clips(1, 256, 20, MIXED).scenes != clips.scenes
    assert {len(scene.balls) for scene in clips.scenes} == {1, 2, 3}
    assert {len(scene.balls) for scene in draw_clips(0, 0, 50, (1.0, 0.0, 0.0)).scenes} == {1}


def test_batch_of_all_tokens_equals_the_rendered_clip() -> None:
    transformer = build_model(seeded(), num_layers=1).transformer
    clips = draw_clips(0, 0, 2, MIXED)
    shape = BatchShape(2, "all", num_frames=4, size=32)
    batch = make_batch(transformer, shape, clips, seeded(5), **OPTIONS)
    assert batch.inputs().shape == (2, 256, IN_CHANNELS * 16)
    truth = torch.stack(
        [render_video(scene, layout, 4, 32, 32) for scene, layout in zip(clips.scenes, clips.layouts, strict=True)]
    )
    torch.testing.assert_close(batch.clean, to_tokens(truth), atol=1e-5, rtol=0)
    expected = to_tokens(condition_channels(truth[:, :, 0], 4))
    torch.testing.assert_close(batch.inputs()[:, :, 48:], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_frames", [8, 16, 17])
@pytest.mark.parametrize(
    ("cut", "tokens", "first"),
    [
        ("frames", 256, 0),
        ("blocks", 256, 0),
        ("frames", 224, 32),
        ("blocks", 224, 32),
        ("near", 256, 48),
        ("crops", 256, 48),
        ("spread", 256, 48),
    ],
)
def test_subsets_hold_tokens_of_the_first_frame_and_none_twice(
    num_frames: int, cut: str, tokens: int, first: int
) -> None:
    clips = draw_clips(0, 0, 8, MIXED)
    shape = BatchShape(8, cut, tokens, first=first, num_frames=num_frames, size=32)
    for index in choose_tokens(shape, clips, seeded(num_frames)):
        assert len(index) == len(index.unique()) == shape.tokens
        assert (index < 64).sum() == (first or 64)
        assert torch.equal(index, index.sort().values)
        assert index[-1] < num_frames * 64


@pytest.mark.parametrize(
    ("cut", "betrays"), [("frames", False), ("blocks", False), ("spread", False), ("near", True), ("crops", True)]
)
def test_which_cuts_betray_where_the_ball_is(cut: str, betrays: bool) -> None:
    shape = BatchShape(8, cut, 64 + 512, first=64, size=32)
    one, other = (choose_tokens(shape, draw_clips(0, start, 8, MIXED), seeded()) for start in (0, 8))
    assert torch.equal(one[:, 64:], other[:, 64:]) != betrays


def test_levels_can_be_spread_evenly_over_the_clips() -> None:
    transformer = build_model(seeded(), num_layers=1).transformer
    shape = BatchShape(8, "frames", 32, num_frames=4, size=16, even=True)
    level = make_batch(transformer, shape, draw_clips(0, 0, 8, MIXED), seeded(), **OPTIONS).level
    uniform = level / (3 - 2 * level)  # before the shift
    assert (uniform * 8).long().tolist() == list(range(8))


def test_near_tokens_hold_most_of_what_moves() -> None:
    clips = draw_clips(0, 0, 4, MIXED)
    shape = BatchShape(4, "near", 128, first=40)
    near = near_tokens(shape, clips)
    assert near.float().mean() < 0.6
    for row, (scene, layout) in enumerate(zip(clips.scenes, clips.layouts, strict=True)):
        video = render_video(scene, layout, 32, 64, 64)
        nobody = replace(clips.paths[[row]], radius=torch.zeros(1, 3))
        change = to_tokens((video - render_video(scene, layout, 32, 64, 64, nobody))[None])[0].square().sum(1)
        assert change[near[row]].sum() > 0.97 * change.sum()


def test_subset_rows_are_those_of_the_whole_clip() -> None:
    transformer = build_model(seeded(), num_layers=1).transformer
    clips = draw_clips(0, 7, 1, MIXED)
    whole = make_batch(transformer, BatchShape(1, "all", num_frames=8, size=32), clips, seeded(2), **OPTIONS)
    shape = BatchShape(1, "near", 64, first=32, num_frames=8, size=32)
    part = make_batch(transformer, shape, clips, seeded(2), **OPTIONS)
    rows = {row.numpy().tobytes(): i for i, row in enumerate(whole.coordinates[0])}
    index = [rows[row.numpy().tobytes()] for row in part.coordinates[0]]
    torch.testing.assert_close(part.clean[0], whole.clean[0, index], atol=1e-5, rtol=0)
    assert torch.equal(part.given[0], whole.given[0, index])
    for side in (0, 1):
        assert torch.equal(part.rope[side][0], whole.rope[side][0, index])
