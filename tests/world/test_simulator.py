"""The physics: energy, contacts, repeatability."""

import pytest
import torch

from residua.world import scenes
from residua.world.simulator import DURATION, GRAVITY, SAMPLES, Paths, energy, simulate


def drawn(seed: int, count: int, balls: int) -> tuple[list[scenes.Scene], list[scenes.Layout]]:
    generator = torch.Generator().manual_seed(seed)
    drawn_scenes = [scenes.random_scene(generator, balls) for _ in range(count)]
    return drawn_scenes, [scenes.random_layout(scene, generator) for scene in drawn_scenes]


@pytest.fixture(scope="module")
def crowd() -> Paths:
    return simulate(*drawn(0, 128, 3))


def test_energy_never_grows(crowd: Paths) -> None:
    total = energy(crowd)
    growth = (total[:, 1:] - total[:, :-1]) / total[:, :1]
    assert growth.max() < 1e-6
    assert (total[:, -1] < 0.95 * total[:, 0]).any(), "nothing ever lost energy"


def test_balls_do_not_overlap(crowd: Paths) -> None:
    touched = 0
    for i in range(3):
        for j in range(i):
            distance = (crowd.position[:, i] - crowd.position[:, j]).norm(dim=-1)
            reach = (crowd.radius[:, i] + crowd.radius[:, j])[:, None]
            assert (distance > 0.97 * reach).all()
            touched += int((distance < 1.01 * reach).any(1).sum())
    assert touched > 30, "hardly any collision: the test proves nothing"


def test_balls_stay_in_their_world(crowd: Paths) -> None:
    radius = crowd.radius[..., None]
    assert (crowd.position[..., 0].abs() < scenes.WALL - radius + 0.02).all()
    assert (crowd.position[..., 1] > radius - 1e-5).all()
    assert (crowd.position[..., 1] < scenes.CEILING - radius + 0.02).all()


def test_the_same_scenes_give_the_same_paths_alone_and_in_company() -> None:
    many_scenes, layouts = drawn(1, 8, 3)
    together = simulate(many_scenes, layouts)
    assert torch.equal(simulate(many_scenes, layouts).position, together.position)
    alone = simulate(many_scenes[5:6], layouts[5:6])
    assert torch.equal(alone.position[0], together.position[5])


def test_a_free_ball_follows_the_parabola() -> None:
    scene = scenes.parse_prompt("a red rubber ball thrown right on a sand floor at noon")
    paths = simulate([scene], [(scenes.BallStart(0.5, -1.5, 2.3),)])
    seconds = torch.arange(SAMPLES)[:40] * DURATION / (SAMPLES - 1)
    vx, vy = scenes.MOTIONS["thrown right"]
    expected = torch.stack([-1.5 + vx * seconds, 2.3 + vy * seconds - GRAVITY / 2 * seconds**2], dim=-1)
    torch.testing.assert_close(paths.position[0, 0, :40], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("material", scenes.MATERIALS)
def test_a_dropped_ball_comes_back_as_high_as_its_material_says(material: str) -> None:
    scene = scenes.parse_prompt(f"a red {material} ball dropped on a sand floor at noon")
    paths = simulate([scene], [(scenes.BallStart(0.5, 0.0, 1.5),)])
    height = paths.position[0, 0, :, 1] - 0.5
    landed = int((height < 0.02).nonzero()[0])
    again = height[landed + 1 :].max()
    torch.testing.assert_close(again, torch.tensor(scenes.MATERIALS[material] ** 2), atol=0.02, rtol=0)


def test_two_equal_balls_exchange_their_velocities_up_to_what_is_lost() -> None:
    prompt = "a red rubber ball rolling right and a blue rubber ball resting on a sand floor at noon"
    scene = scenes.parse_prompt(prompt)
    paths = simulate([scene], [(scenes.BallStart(0.5, -1.5, 0.5), scenes.BallStart(0.5, 0.0, 0.5))])
    speed = paths.velocity[0, :2, SAMPLES // 3, 0]  # after the collision, before a wall
    elasticity = scenes.MATERIALS["rubber"]
    expected = torch.tensor([1.5 * (1 - elasticity) / 2, 1.5 * (1 + elasticity) / 2])
    torch.testing.assert_close(speed, expected)


def test_positions_between_samples_are_interpolated() -> None:
    paths = simulate(*drawn(2, 2, 2))
    times = torch.tensor([[0.0, 0.5 / (SAMPLES - 1), 1.0]] * 2)
    at = paths.at(times)
    assert at.shape == (2, scenes.MAX_BALLS, 3, 2)
    assert torch.equal(at[:, :, 0], paths.position[:, :, 0])
    torch.testing.assert_close(at[:, :, 1], paths.position[:, :, :2].mean(2))
    torch.testing.assert_close(at[:, :, 2], paths.position[:, :, -1])
