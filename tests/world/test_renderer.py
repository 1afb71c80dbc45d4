"""The pictures: balls where they are, light where it falls, the same clip every time."""

import pytest
import torch

from residua.world import renderer, scenes
from residua.world.simulator import simulate

PROMPT = "a {colour} rubber ball {motion} on a {floor} floor {time}"


def picture(
    colour: str = "red",
    floor: str = "sand",
    time: str = "at noon",
    motion: str = "dropped",
    place: scenes.BallStart = scenes.BallStart(0.6, 0.0, 1.6),  # noqa: B008
    frames: int = 1,
    size: int = 64,
) -> torch.Tensor:
    scene = scenes.parse_prompt(PROMPT.format(colour=colour, floor=floor, time=time, motion=motion))
    return renderer.render_video(scene, (place,), frames, size, size)


def test_the_same_scene_gives_the_same_clip() -> None:
    first = picture(frames=5)
    assert first.shape == (3, 5, 64, 64)
    assert first.min() >= -1
    assert first.max() <= 1
    assert torch.equal(picture(frames=5), first)
    assert not torch.equal(picture(frames=5, colour="blue"), first)


def test_the_ball_is_round_and_where_the_camera_says() -> None:
    red, green, _ = (picture(size=128)[:, 0] + 1) / 2
    ball = (red - green) > 0.35 * red
    y, x = ball.nonzero(as_tuple=True)
    centre_x, centre_y, scale = renderer.project(torch.tensor(0.0), torch.tensor(1.6))
    assert abs(float(x.double().mean()) - (float(centre_x) + 1) * 64 + 0.5) < 1.5
    assert abs(float(y.double().mean()) - (float(centre_y) + 1) * 64 + 0.5) < 1.5
    assert abs(int(x.max() - x.min()) - int(y.max() - y.min())) <= 2
    assert abs(int(x.max() - x.min()) + 1 - 2 * 0.6 * float(scale) * 64) < 3


@pytest.mark.parametrize(("time", "side"), [("in the morning", -1), ("in the evening", 1)])
def test_the_side_towards_the_sun_is_lit_and_the_shadow_falls_on_the_other(time: str, side: int) -> None:
    image = (picture(time=time)[:, 0] + 1) / 2
    empty = (picture(time=time, place=scenes.BallStart(0.6, 0.0, 80.0))[:, 0] + 1) / 2
    row = int((float(renderer.project(torch.tensor(0.0), torch.tensor(1.6))[1]) + 1) * 32)
    towards, away = (image[0, row, 32 + direction * side * 5] for direction in (1, -1))
    assert towards > away + 0.1
    darker = (empty - image).mean(0).clamp_min(0) * (image.amax(0) - image.amin(0) < 0.5)
    darker[: row + 10] = 0  # the ball itself
    columns = torch.arange(64) + 0.5 - 32
    assert float((darker.sum(0) * columns).sum() / darker.sum()) * side < -2


def test_the_shadow_follows_the_ball() -> None:
    clip = picture(motion="thrown right", place=scenes.BallStart(0.6, -1.2, 1.8), frames=8)
    floor = (clip[:, :, 44:] + 1).mean((0, 2))  # [T, W], brightness of the floor by column
    darkest = floor.argmin(1)
    assert darkest[4] > darkest[0] + 8


def test_any_subset_of_pixels_is_that_of_the_whole_picture() -> None:
    generator = torch.Generator().manual_seed(0)
    scene = scenes.random_scene(generator, 3)
    layout = scenes.random_layout(scene, generator)
    paths = simulate([scene], [layout])
    video = renderer.render_video(scene, layout, 6, 32, 32, paths)  # [3, T, H, W]
    frame = torch.tensor([[0, 2, 5]])
    pixels = torch.randint(32 * 32, (1, 3, 10), generator=generator)
    rays = renderer.camera_rays(32, 32)[pixels]
    centres = paths.at(renderer.frame_times(6)[frame])
    colours = renderer.shade(renderer.look_of([scene]), rays, centres, paths.radius, 2 / 32)  # [1, 3, 10, 3]
    for row, t in enumerate(frame[0].tolist()):
        expected = video[:, t].flatten(1)[:, pixels[0, row]].T
        torch.testing.assert_close(colours[0, row], expected, atol=1e-5, rtol=0)


def test_more_frames_are_finer_in_time_and_end_alike() -> None:
    short, long = picture(frames=3, motion="thrown right"), picture(frames=5, motion="thrown right")
    torch.testing.assert_close(short, long[:, ::2])
