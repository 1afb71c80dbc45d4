"""Prompts, scenes and layouts."""

import math

import pytest
import torch

from residua.world import scenes


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("balls", [1, 2, 3])
def test_every_scene_survives_its_own_prompt(balls: int) -> None:
    generator = seeded()
    for _ in range(100):
        scene = scenes.random_scene(generator, balls)
        assert scenes.parse_prompt(str(scene)) == scene
        assert len(scene.balls) == balls
        assert scene.balls[0].motion != "resting"


def test_case_spaces_and_full_stop_do_not_matter() -> None:
    scene = scenes.parse_prompt("  A RED rubber ball  thrown left on a sand floor at noon. ")
    assert scene == scenes.Scene("sand", "at noon", (scenes.Ball("red", "rubber", "thrown left"),))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("a pink rubber ball dropped on a sand floor at noon", "unknown colour 'pink'"),
        ("a red glass ball dropped on a sand floor at noon", "unknown material 'glass'"),
        ("a red rubber ball kicked on a sand floor at noon", "unknown motion 'kicked'"),
        ("a red rubber ball dropped on a lava floor at noon", "unknown floor 'lava'"),
        ("a red rubber ball dropped on a sand floor at midnight", "unknown time 'at midnight'"),
        ("a red rubber ball dropped", "does not end with"),
        ("a red cube dropped on a sand floor at noon", "does not read"),
        ("", "does not end with"),
        ("a red clay ball dropped and a red clay ball resting on a sand floor at noon", "one colour"),
    ],
)
def test_errors_name_the_reason_and_the_vocabulary(prompt: str, reason: str) -> None:
    with pytest.raises(scenes.PromptError) as error:
        scenes.parse_prompt(prompt)
    assert reason in str(error.value)
    assert repr(prompt) in str(error.value)
    assert "red, yellow" in str(error.value)


def test_more_balls_than_the_model_knows_are_refused() -> None:
    two = "a red clay ball dropped and a blue clay ball resting on a sand floor at noon"
    with pytest.raises(scenes.PromptError, match="2 balls, at most 1"):
        scenes.parse_prompt(two, max_balls=1)


@pytest.mark.parametrize("motion", scenes.MOTIONS)
def test_even_crowded_scenes_find_room(motion: str) -> None:
    balls = tuple(scenes.Ball(colour, "clay", motion) for colour in ("red", "green", "blue"))
    scene = scenes.Scene("sand", "at noon", balls)
    layout = scenes.default_layout(scene)
    assert layout == scenes.default_layout(scene)
    for i, a in enumerate(layout):
        assert abs(a.x) + a.radius < scenes.WALL
        assert a.radius <= a.y < scenes.CEILING - a.radius
        for b in layout[:i]:
            assert math.hypot(a.x - b.x, a.y - b.y) > a.radius + b.radius


def test_randomness_comes_from_the_generator_only() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    scene = scenes.random_scene(seeded(3), 3)
    layout = scenes.random_layout(scene, seeded(4))
    assert torch.equal(torch.get_rng_state(), state), "the global generator was touched"
    assert scene == scenes.random_scene(seeded(3), 3)
    assert layout == scenes.random_layout(scene, seeded(4))
    assert layout != scenes.random_layout(scene, seeded(5))
