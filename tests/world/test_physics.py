"""The physics metric finds seeded faults and nothing else."""

import numpy as np
import pytest
import torch

from residua.errors import InputError
from residua.world import scenes
from residua.world.physics import physics_of, track_balls, true_tracks
from residua.world.renderer import render_video
from residua.world.simulator import simulate

ONE = scenes.parse_prompt("a red rubber ball dropped on a sand floor at noon")
ONE_LAYOUT = (scenes.BallStart(0.6, 0.0, 2.3),)
TWO = scenes.parse_prompt(
    "a blue rubber ball thrown right and a yellow clay ball resting on a brick floor in the evening"
)
TWO_LAYOUT = (scenes.BallStart(0.6, -1.4, 1.8), scenes.BallStart(0.62, 0.9, 0.62))


def clip(scene: scenes.Scene, layout: scenes.Layout, frames: int = 32) -> np.ndarray:
    video = render_video(scene, layout, frames, 64, 64)
    return (video.permute(1, 2, 3, 0).numpy() + 1) / 2


def without_ball(scene: scenes.Scene, layout: scenes.Layout, which: int) -> np.ndarray:
    keep = [i for i in range(len(scene.balls)) if i != which]
    rest = scenes.Scene(scene.floor, scene.time, tuple(scene.balls[i] for i in keep))
    return clip(rest, tuple(layout[i] for i in keep))


@pytest.mark.parametrize(("scene", "layout"), [(ONE, ONE_LAYOUT), (TWO, TWO_LAYOUT)])
def test_identical_videos_score_zero(scene: scenes.Scene, layout: scenes.Layout) -> None:
    video = clip(scene, layout)
    physics = physics_of(video, scene, video)
    assert physics.position_error == physics.worst_error == 0
    assert physics.lost == physics.torn == physics.merged == 0
    assert physics.missing_bounces == physics.extra_bounces == 0
    assert physics.kept
    assert physics.balls == len(scene.balls)


@pytest.mark.parametrize("balls", [1, 2, 3])
def test_rendered_clips_obey_the_simulator(balls: int) -> None:
    generator = torch.Generator().manual_seed(balls)
    for _ in range(12):
        scene = scenes.random_scene(generator, balls)
        layout = scenes.random_layout(scene, generator)
        paths = simulate([scene], [layout])
        video = render_video(scene, layout, 32, 64, 64, paths).permute(1, 2, 3, 0)
        physics = physics_of((video + 1) / 2, scene, paths)
        assert physics.position_error < 0.06, scene
        assert physics.kept, scene
        assert physics.missing_bounces == physics.extra_bounces == 0, scene


def test_layout_and_paths_are_the_same_reference() -> None:
    video = clip(ONE, ONE_LAYOUT)
    assert physics_of(video, ONE, ONE_LAYOUT) == physics_of(video, ONE, simulate([ONE], [ONE_LAYOUT]))
    assert physics_of(torch.from_numpy(video), ONE, ONE_LAYOUT).bounces == 1


def test_a_lost_ball_is_found() -> None:
    video = clip(TWO, TWO_LAYOUT)
    video[20:] = without_ball(TWO, TWO_LAYOUT, 0)[20:]
    physics = physics_of(video, TWO, clip(TWO, TWO_LAYOUT))
    assert physics.lost == 1
    assert not physics.kept


def test_a_ball_that_flickers_for_a_frame_is_not_lost() -> None:
    video = clip(TWO, TWO_LAYOUT)
    video[20] = without_ball(TWO, TWO_LAYOUT, 0)[20]
    assert physics_of(video, TWO, TWO_LAYOUT).lost == 0


def test_merged_balls_are_found() -> None:
    reference = clip(TWO, TWO_LAYOUT)
    video = reference.copy()
    own = track_balls(reference, ["blue", "yellow"])
    x, y = own[1].centre[16].round().astype(int)
    rows, columns = np.mgrid[:64, :64]
    half = (np.hypot(columns - x, rows - y) < own[1].radius) & (columns < x)
    video[16:] = without_ball(TWO, TWO_LAYOUT, 0)[16:]
    video[16:, half] = scenes.COLOURS["blue"]  # two halves of one ball
    physics = physics_of(video, TWO, reference)
    assert physics.merged == 1
    assert not physics.kept


def test_a_torn_ball_is_found() -> None:
    video = clip(ONE, ONE_LAYOUT)
    background = without_ball(TWO, TWO_LAYOUT, 0)[0, 0, 0]
    for t, (x, _) in enumerate(track_balls(video, ["red"])[0].centre):
        video[t, :, round(x) - 1 : round(x) + 2] = background
    physics = physics_of(video, ONE, ONE_LAYOUT)
    assert physics.torn == 1


def test_a_missing_bounce_is_found() -> None:
    reference = clip(ONE, ONE_LAYOUT)
    lands = int(true_tracks(ONE, simulate([ONE], [ONE_LAYOUT]), 32, 64, 64)[0].centre[:, 1].argmax())
    video = reference.copy()
    video[lands:] = reference[lands]  # it stays where it fell
    physics = physics_of(video, ONE, reference)
    assert physics.missing_bounces == 1
    assert physics.extra_bounces == 0
    assert physics_of(reference, ONE, video).extra_bounces == 1


def test_a_late_bounce_is_a_missing_and_an_extra_one() -> None:
    reference = clip(ONE, ONE_LAYOUT)
    video = np.concatenate([reference[:1].repeat(5, axis=0), reference[:-5]])
    physics = physics_of(video, ONE, reference)
    assert (physics.missing_bounces, physics.extra_bounces) == (1, 1)
    assert physics.kept


@pytest.mark.parametrize("shift", [2, 4])
def test_a_shifted_path_is_measured_in_radii(shift: int) -> None:
    reference = clip(ONE, ONE_LAYOUT)
    physics = physics_of(np.roll(reference, shift, axis=2), ONE, reference)
    radius = track_balls(reference, ["red"])[0].radius
    assert physics.position_error == pytest.approx(shift / radius)
    assert physics.worst_error == pytest.approx(shift / radius)


def test_a_video_without_the_ball_has_no_position_error() -> None:
    video = np.full((8, 16, 16, 3), 0.5)
    physics = physics_of(video, ONE, ONE_LAYOUT)
    assert physics.lost == 1
    assert np.isnan(physics.position_error)
    assert "lost 1" in str(physics)


def test_a_reference_without_the_ball_loses_none() -> None:
    """A dense video may have lost the ball, too: then there is nothing to compare with."""
    video = clip(ONE, ONE_LAYOUT, frames=4)
    physics = physics_of(video, ONE, np.zeros_like(video))
    assert physics.lost == physics.bounces == 0 and np.isnan(physics.position_error)


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 64, 64), (3, 33, 47), (8, 96, 48)])
def test_one_frame_and_odd_sizes_are_measured(frames: int, height: int, width: int) -> None:
    video = (render_video(ONE, ONE_LAYOUT, frames, height, width) + 1) / 2
    physics = physics_of(video.permute(1, 2, 3, 0), ONE, ONE_LAYOUT)
    assert physics.kept and physics.position_error < 0.1


def test_shapes_that_are_no_pair_of_videos_are_refused() -> None:
    video = clip(ONE, ONE_LAYOUT, frames=2)
    with pytest.raises(InputError, match="two of one shape"):
        physics_of(video, ONE, video[:1])
    with pytest.raises(InputError, match=r"wanted \[T, H, W, 3\]"):
        physics_of(video[0], ONE, video)
    with pytest.raises(InputError, match=r"wanted \[T, H, W, 3\]"):
        physics_of(video[:0], ONE, ONE_LAYOUT)
