"""References and image prompts of Flux: keys that are no part of the picture."""

import pytest
import torch

REFERENCES = 64


def with_image_prompt(model):
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.set_attn_processor(
            {
                name: processor if name.startswith("single") else FluxIPAdapterAttnProcessor(32, 16, (4,), 0.5)
                for name, processor in model.attn_processors.items()
            }
        )


@pytest.mark.parametrize("order", ["before", "after"])
def test_ip_adapter_of_flux(order, tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("flux")
    plain = denoise(model, inputs, scheduler)
    inputs["joint_attention_kwargs"] = {"ip_hidden_states": [tiny.noise(1, 4, 16)]}
    if order == "before":
        with_image_prompt(model)
    handle = speed_up(model, 1.0, scheduler=scheduler)
    if order == "after":
        with_image_prompt(model)
    names = {name for name, _ in model.named_parameters()}
    same = denoise(model, inputs, scheduler)
    double, single = handle.report().transformers[0].layers
    assert (double.sparse, double.dense) == (6, {"first steps": 2, "image prompt (IP-Adapter)": 8})
    assert (single.sparse, single.dense) == (6, {"first steps": 2})
    assert {name for name, _ in model.named_parameters()} == names
    handle.remove()
    dense = denoise(model, inputs, scheduler)
    assert (same - dense).abs().max() <= 2e-5 * dense.abs().max() < (plain - dense).abs().max()
    assert torch.equal(denoise(model, inputs, scheduler), dense)
    assert model.transformer_blocks[0].attn.processor._attention_backend is None


@pytest.mark.parametrize("density", [1.0, 0.3])
def test_flux_2_with_kept_references(density, tiny, scheduler, speed_up):
    """Their keys are made in the first step, where they attend to themselves alone; later steps have more
    keys than queries."""
    tiny.need("Flux2KleinKVPipeline")
    from diffusers.models.transformers import transformer_flux2 as flux2

    model, inputs = tiny.build("flux 2")
    for block in model.transformer_blocks:
        block.attn.set_processor(flux2.Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(flux2.Flux2KVParallelSelfAttnProcessor())
    references, places = tiny.noise(1, REFERENCES, 4) + 1, tiny.places(REFERENCES, 4)[None] + 1
    first = {
        **inputs,
        "hidden_states": torch.cat([references, inputs["hidden_states"]], dim=1),
        "img_ids": torch.cat([places, inputs["img_ids"]], dim=1),
        "num_ref_tokens": REFERENCES,
    }

    @torch.no_grad()
    def denoise():
        scheduler.set_timesteps(4)
        out, kept = model(**first, kv_cache_mode="extract")
        outputs = [out]
        for step in range(1, 4):
            scheduler.step_index = step
            outputs.append(model(**inputs, kv_cache=kept, kv_cache_mode="cached")[0])
        return torch.stack(outputs)

    dense = denoise()
    with speed_up(model, density, scheduler=scheduler, dense_steps=0) as handle:
        out = denoise()
        total = handle.report().total
    assert total.sparse == 2 * (2 + 3) and not total.dense
    assert {(shape["q"][2], shape["k"][2]) for shape in total.shapes} == {(200, 264), (64, 64)}
    apart = (out - dense).abs().max() / dense.abs().max()
    assert apart <= 2e-5 if density == 1.0 else 1e-3 < apart < 1
    assert torch.equal(denoise(), dense)
