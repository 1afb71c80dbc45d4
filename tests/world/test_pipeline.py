"""The diffusers pipeline, with random and with shipped weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from residua.errors import InputError
from residua.world import load_pipeline, scenes
from residua.world.renderer import render_video

pytest.importorskip("diffusers")

from diffusers import FlowMatchEulerDiscreteScheduler

from residua.world.model import build_model
from residua.world.pipeline import WorldPipeline

PROMPT = "a red rubber ball thrown right on a sand floor at noon"
TINY = {"height": 16, "width": 16, "num_frames": 3, "num_inference_steps": 2}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pipeline() -> WorldPipeline:
    generator = seeded()
    model = build_model(generator)
    with torch.no_grad():
        for param in model.transformer.parameters():
            param.add_(torch.randn(param.shape, generator=generator), alpha=0.02)
    pipeline = WorldPipeline(model.transformer.eval(), FlowMatchEulerDiscreteScheduler(shift=3.0), model.prompt_table)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_roundtrip_through_a_folder(pipeline: WorldPipeline, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    again = WorldPipeline.from_pretrained(str(tmp_path))
    again.set_progress_bar_config(disable=True)
    first = pipeline(PROMPT, generator=seeded(), guidance_scale=2.0, **TINY).frames
    second = again(PROMPT, generator=seeded(), guidance_scale=2.0, **TINY).frames
    np.testing.assert_array_equal(first, second)


def test_the_seed_decides_and_the_global_generator_does_not(pipeline: WorldPipeline) -> None:
    torch.manual_seed(0)
    first = pipeline(PROMPT, generator=seeded(1), **TINY).frames
    torch.manual_seed(1)
    np.testing.assert_array_equal(pipeline(PROMPT, generator=seeded(1), **TINY).frames, first)
    assert not np.array_equal(pipeline(PROMPT, generator=seeded(2), **TINY).frames, first)


def test_output_types(pipeline: WorldPipeline) -> None:
    array = pipeline(PROMPT, generator=seeded(), **TINY).frames
    tensor = pipeline(PROMPT, generator=seeded(), output_type="pt", **TINY).frames
    images = pipeline(PROMPT, generator=seeded(), output_type="pil", return_dict=False, **TINY)[0]
    assert array.shape == (1, 3, 16, 16, 3)
    assert tensor.shape == (1, 3, 3, 16, 16)
    assert len(images[0]) == 3
    assert isinstance(images[0][0], Image.Image)
    np.testing.assert_allclose(tensor[0].permute(0, 2, 3, 1).numpy(), array[0])


def test_batch_equals_single_prompts(pipeline: WorldPipeline) -> None:
    prompts = [PROMPT, "a blue clay ball lobbed left on a slate floor in the evening"]
    batch = pipeline(prompts, generator=[seeded(1), seeded(2)], **TINY).frames
    for row, prompt in enumerate(prompts):
        single = pipeline(prompt, generator=seeded(row + 1), **TINY).frames[0]
        np.testing.assert_allclose(batch[row], single, atol=1e-5)


def test_images_of_all_kinds_are_the_same_first_frame(pipeline: WorldPipeline) -> None:
    scene = scenes.parse_prompt(PROMPT)
    frame = (render_video(scene, scenes.default_layout(scene), 1, 16, 16)[:, 0] + 1) / 2  # [3, H, W]
    pixels = (frame.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    rendered = pipeline(PROMPT, generator=seeded(), **TINY).frames
    from_tensor = pipeline(PROMPT, image=frame[None], generator=seeded(), **TINY).frames
    picture = Image.fromarray(pixels)
    from_image = pipeline(PROMPT, image=picture, generator=seeded(), **TINY).frames
    np.testing.assert_allclose(from_tensor, rendered, atol=1e-5)
    np.testing.assert_allclose(from_image, rendered, atol=0.05)
    for same in (pixels, picture.convert("RGBA"), [picture]):
        frames = pipeline(PROMPT, image=same, generator=seeded(), **TINY).frames
        np.testing.assert_allclose(frames, from_image, atol=1e-5)


def test_callback_sees_every_step_and_may_change_the_latents(pipeline: WorldPipeline) -> None:
    steps = []

    def callback(pipe: object, step: int, timestep: torch.Tensor, tensors: dict) -> dict:
        steps.append((step, float(timestep)))
        return {"latents": torch.zeros_like(tensors["latents"])}

    frames = pipeline(PROMPT, generator=seeded(), callback_on_step_end=callback, **TINY).frames
    assert [step for step, _ in steps] == [0, 1]
    assert steps[0][1] > steps[1][1]
    assert (frames == 0.5).all()


def test_branches_run_in_their_cache_contexts(pipeline: WorldPipeline, monkeypatch) -> None:
    names = []
    original = pipeline.transformer.cache_context

    def recording(name: str):
        names.append(name)
        return original(name)

    monkeypatch.setattr(pipeline.transformer, "cache_context", recording)
    pipeline(PROMPT, generator=seeded(), guidance_scale=2.0, **TINY)
    assert names == ["cond", "uncond"] * 2
    names.clear()
    pipeline(PROMPT, generator=seeded(), **TINY)
    assert names == ["cond"] * 2


@pytest.mark.parametrize(
    "bad", [{"height": 18}, {"width": 0}, {"num_frames": 0}, {"num_inference_steps": 0}, {"output_type": "gif"}]
)
def test_bad_sizes_are_refused(pipeline: WorldPipeline, bad: dict) -> None:
    with pytest.raises(InputError, match="wanted"):
        pipeline(PROMPT, **(TINY | bad))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": []}, "no prompt"),
        ({"image": torch.rand(3, 3, 16, 16)}, "image: 3 of 3 channels for 1 prompts"),
        ({"image": torch.rand(1, 4, 16, 16)}, "image: 1 of 4 channels"),
        ({"latents": torch.rand(1, 3, 3, 8, 16)}, r"latents of shape \[1, 3, 3, 8, 16\]"),
    ],
)
def test_inputs_that_do_not_fit_each_other_are_refused(pipeline: WorldPipeline, bad: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipeline(**({"prompt": PROMPT} | TINY | bad))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model_index\.json"):
        load_pipeline(tmp_path)
