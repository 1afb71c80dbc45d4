"""Every family on a tiny random model: the same as dense at density 1, as configured below it, and gone
after."""

from __future__ import annotations

import pytest
import torch

from residua import IntegrationError

NAMES = [
    "wan", "wan i2v", "wan ti2v", "wan vace", "skyreels", "hunyuan", "hunyuan i2v", "hunyuan 1.5",
    "cosmos 2.5", "cosmos 3", "cogvideox", "ltx", "ltx 2", "mochi",
]  # fmt: skip
# What is not video: text queries and text keys of one call.
TEXT = {
    "hunyuan": (8, 8),
    "hunyuan i2v": (8, 8),
    "hunyuan 1.5": (13, 13),
    "cosmos 3": (0, 7),
    "cogvideox": (8, 8),
    "mochi": (6, 6),
}


@pytest.mark.parametrize("name", NAMES)
def test_density_one_is_dense_and_removal_is_exact(name, tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build(name)
    dense = denoise(model, inputs, scheduler)
    with speed_up(model, 1.0, scheduler=scheduler) as handle:
        same = denoise(model, inputs, scheduler)
        report = handle.report()
    assert report.total.sparse > 0
    assert (same - dense).abs().max() <= 2e-5 * dense.abs().max()
    assert torch.equal(denoise(model, inputs, scheduler), dense)


@pytest.mark.parametrize("name", NAMES)
def test_sparse_calls_and_density_are_as_configured(name, tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build(name)
    dense = denoise(model, inputs, scheduler)
    handle = speed_up(model, 0.22, scheduler=scheduler)
    out = denoise(model, inputs, scheduler)
    report = handle.report()
    [transformer] = report.transformers
    assert transformer.grids == [(3, 8, 8)]
    text_q, text_k = TEXT.get(name, (0, 0))
    for layer in transformer.layers:
        assert (layer.sparse, layer.warm) == (6, 4)  # 3 sparse steps x 2 branches, cold once per branch
        assert layer.dense == {"first steps": 2, **({"text pathway": 8} if name == "cosmos 3" else {})}
        assert layer.density == layer.pairs["total"] / layer.pairs["possible"]
        video = {"q": tiny.VIDEO + text_q, "k": tiny.VIDEO + text_k}
        assert {(shape["q"][2], shape["k"][2]) for shape in layer.shapes} >= {(video["q"], video["k"])}
        assert (layer.pairs["pinned"] > 0, layer.pairs["exact"] > 0) == (text_k > 0, text_q > 0)
        assert layer.error is not None and layer.error > 0
        # Beyond the budget come only exact text rows.
        assert layer.density <= 0.22 + text_q / video["q"] + 1e-9
    assert torch.isfinite(out).all()
    assert not torch.equal(out, dense)


def test_causal_text_pathway_of_cosmos3_stays_exact(tiny, scheduler, denoise, speed_up):
    """Grouped K/V heads: 4 query heads on 2; video keys begin after the text keys."""
    model, inputs = tiny.build("cosmos 3")
    handle = speed_up(model, 0.22, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    shapes = handle.report().total.shapes
    assert {(tuple(s["q"]), tuple(s["k"])) for s in shapes} == {
        ((1, 4, 7, 16), (1, 2, 7, 16)),
        ((1, 4, 192, 16), (1, 2, 199, 16)),
    }
    layer = handle.attachments[0].layers[0]
    site = layer.site(192, 199)
    assert (site.text_queries, site.text_keys) == ((), ((0, 7),))
    site = layer.site(195, 202)  # three sound tokens after the video
    assert (site.text_queries, site.text_keys) == (((192, 195),), ((0, 7), (199, 202)))


def test_hunyuan15_never_builds_the_square_mask(tiny, scheduler, denoise, speed_up, monkeypatch):
    model, inputs = tiny.build("hunyuan 1.5")
    seen = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(*tensors, attn_mask=None, **rest):
        seen.append(None if attn_mask is None else tuple(attn_mask.shape))
        return sdpa(*tensors, attn_mask=attn_mask, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    denoise(model, inputs, scheduler, 1)
    assert (1, 1, 205, 205) in seen  # diffusers alone does
    seen.clear()
    speed_up(model, 0.22, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    assert (1, 1, 1, 205) in seen and (1, 1, 205, 205) not in seen


def test_padded_text_changes_nothing(tiny, scheduler, denoise, speed_up):
    """Different values behind the mask: the same video."""
    model, inputs = tiny.build("hunyuan")
    changed = inputs["encoder_hidden_states"].clone()
    changed[:, 5:] = 7.0
    speed_up(model, 0.22, scheduler=scheduler)
    first = denoise(model, inputs, scheduler)
    second = denoise(model, {**inputs, "encoder_hidden_states": changed}, scheduler)
    assert torch.allclose(first, second, atol=1e-6)


def test_causal_blocks_of_skyreels_stay_dense_and_are_counted(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("skyreels")
    model._set_ar_attention(3)
    dense = denoise(model, inputs, scheduler)
    handle = speed_up(model, 0.22, scheduler=scheduler)
    assert torch.equal(denoise(model, inputs, scheduler), dense)
    total = handle.report().total
    assert total.sparse == 0
    assert total.dense == {"first steps": 4, "mask is not key padding": 12}


def test_control_blocks_of_vace_have_the_depth_of_their_main_block(tiny, scheduler, speed_up):
    model, _ = tiny.build("wan vace")
    handle = speed_up(model, scheduler=scheduler, dense_layers=1)
    first = [layer.name for layer in handle.attachments[0].layers if layer.depth == 0]
    assert sorted(first) == ["blocks.0.attn1", "vace_blocks.0.attn1"]


def test_video_tokens_that_do_not_fit_are_an_error(tiny, scheduler, speed_up, one_pass, monkeypatch):
    model, inputs = tiny.build("wan")
    handle = speed_up(model, scheduler=scheduler, dense_steps=0)
    monkeypatch.setattr(handle.attachments[0].family, "tokens", lambda *_: 500, raising=False)
    with torch.no_grad(), pytest.raises(IntegrationError, match="500 video tokens do not fit 192 queries"):
        one_pass(model, inputs)
