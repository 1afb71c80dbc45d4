"""A modular pipeline whose guider asks the transformer one to three times per step, with hooks in between."""

import diffusers
import pytest
import torch

LAYERS, STEPS = 3, 5


def skip_one():
    return diffusers.hooks.LayerSkipConfig(indices=[1], fqn="blocks")


def smoothed_energy():
    return diffusers.SmoothedEnergyGuidance(
        guidance_scale=4.0,
        seg_guidance_scale=2.0,
        seg_blur_sigma=10.0,
        seg_guidance_config=diffusers.hooks.SmoothedEnergyGuidanceConfig(indices=[1], fqn="blocks"),
    )


# Each with the calls of a sparse step 2, by layer.
GUIDERS = {
    "no guidance after a while": (
        lambda: diffusers.ClassifierFreeGuidance(guidance_scale=4.0, start=0.2, stop=0.7),
        [2, 2, 2],
    ),
    "skip layer": (
        lambda: diffusers.SkipLayerGuidance(
            guidance_scale=4.0,
            skip_layer_guidance_start=0.2,
            skip_layer_guidance_stop=0.9,
            skip_layer_config=skip_one(),
        ),
        [3, 2, 3],
    ),
    "smoothed energy": (smoothed_energy, [3, 3, 3]),
    "auto": (lambda: diffusers.AutoGuidance(guidance_scale=4.0, auto_guidance_config=skip_one()), [2, 1, 2]),
}


@pytest.mark.parametrize("name", GUIDERS)
def test_keeping_everything_is_dense_and_removal_is_exact(name, pipes, speed_up):
    guider, calls = GUIDERS[name]
    blocks = modular_blocks()
    for part in [part for part in blocks.sub_blocks if "text" in part or "decode" in part or "vae" in part]:
        blocks.sub_blocks.pop(part)
    pipe = blocks.init_pipeline()
    transformer = pipes.model(pipes.tiny.wan(layers=LAYERS))
    pipe.update_components(transformer=transformer, scheduler=pipes.unipc(), guider=guider())
    pipe.set_progress_bar_config(disable=True)

    def generate():
        return pipe(**pipes.EMBEDS, **pipes.SIZE, num_inference_steps=STEPS, generator=pipes.seeded(), output="latents")

    dense = generate()
    with speed_up(pipe, 1.0) as handle:
        assert (generate() - dense).abs().max() <= 2e-5 * dense.abs().max()
        [report] = handle.report().transformers
        tallies = handle.attachments[0].host.log.tallies
    assert report.runs == 1
    assert [
        sum(tally.sparse for key, tally in tallies.items() if (key.layer, key.step) == (layer, 2))
        for layer in range(LAYERS)
    ] == calls
    assert torch.equal(generate(), dense)


def modular_blocks():
    try:
        from diffusers.modular_pipelines import WanBlocks
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"diffusers {diffusers.__version__}: {error}")
    return WanBlocks()
