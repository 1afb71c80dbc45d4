"""Prompts and procedural clips."""

import pytest
import torch

from residua.mini import data


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_scene_survives_its_own_prompt() -> None:
    generator = seeded()
    for _ in range(200):
        scene = data.random_scene(generator, two_objects=0.5)
        assert data.parse_prompt(str(scene), max_objects=2) == scene


def test_case_spaces_and_full_stop_do_not_matter() -> None:
    scene = data.parse_prompt("  An ORANGE circle  moving up on a grey background. ")
    assert scene == data.Scene("grey", (data.SceneObject("orange", "circle", "up"),))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("a pink circle moving left on a grey background", "unknown colour 'pink'"),
        ("a red cat moving left on a grey background", "unknown shape 'cat'"),
        ("a red circle moving home on a grey background", "unknown direction 'home'"),
        ("a red circle moving left on a pink background", "unknown background 'pink'"),
        ("a red circle moving left", "does not end with"),
        ("red circle on a grey background", "does not read"),
        ("", "does not end with"),
        (
            "a red circle moving left and a blue square moving up on a grey background",
            "2 objects, at most 1",
        ),
    ],
)
def test_errors_name_the_reason_and_the_vocabulary(prompt: str, reason: str) -> None:
    with pytest.raises(data.PromptError) as error:
        data.parse_prompt(prompt)
    assert reason in str(error.value)
    assert repr(prompt) in str(error.value)
    assert "circle, square" in str(error.value)


def test_clips_depend_on_the_generator_only() -> None:
    def clip(seed: int) -> torch.Tensor:
        generator = seeded(seed)
        scene = data.random_scene(generator)
        return data.render_video(scene, data.random_layout(scene, generator), 4, 32, 32)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = clip(3)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was touched"
    torch.manual_seed(1)
    assert torch.equal(clip(3), first)
    assert not torch.equal(clip(4), first)


@pytest.mark.parametrize("shape", data.SHAPES)
@pytest.mark.parametrize("motion", data.MOTIONS)
def test_objects_move_as_the_prompt_says(shape: str, motion: str) -> None:
    scene = data.parse_prompt(f"a white {shape} moving {motion} on a black background")
    video = data.render_video(scene, data.default_layout(scene), 5, 64, 64)
    assert video.shape == (3, 5, 64, 64)
    cover = (video[0] - video[0].min()) / (video[0].max() - video[0].min())  # [T, H, W]
    _, y, x = data.axes(5, 64, 64)
    area = cover.sum(dim=(1, 2))
    centre = torch.stack([(cover * x).sum(dim=(1, 2)), (cover * y[:, None]).sum(dim=(1, 2))]) / area
    wanted = torch.tensor(data.MOTIONS[motion]) * data.TRAVEL
    torch.testing.assert_close(centre[:, -1] - centre[:, 0], wanted, atol=0.01, rtol=0)
    torch.testing.assert_close(area, area[:1].expand(5), rtol=0.02, atol=0)
