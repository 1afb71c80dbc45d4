"""Residua with other packages that make a model faster or smaller; each test needs its package."""

import pytest
import torch


def check(model, inputs, scheduler, denoise, speed_up) -> None:
    """The changed model at density 1 is the changed model, sparse calls are counted, removal is exact."""
    dense = denoise(model, inputs, scheduler)
    with speed_up(model, 1.0, scheduler=scheduler):
        assert (denoise(model, inputs, scheduler) - dense).abs().max() <= 1e-4 * dense.abs().max()
    with speed_up(model, 0.22, scheduler=scheduler) as handle:
        assert not torch.equal(denoise(model, inputs, scheduler), dense)
        assert [(layer.sparse, layer.warm) for layer in handle.report().transformers[0].layers] == [(6, 4)] * 2
    assert torch.equal(denoise(model, inputs, scheduler), dense)


def test_torchao_int8_weights(tiny, scheduler, denoise, speed_up):
    quantization = pytest.importorskip("torchao.quantization")
    model, inputs = tiny.build("wan")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert type(model.blocks[0].attn1.to_q.weight) is not torch.nn.Parameter
    check(model, inputs, scheduler, denoise, speed_up)


def test_gguf_weights(tiny, scheduler, denoise, speed_up):
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    model, inputs = tiny.settled(tiny.wan(heads=8))  # a width of 96: blocks of this format have 32 values
    kind = gguf.GGMLQuantizationType.Q8_0
    for block in model.blocks:
        for name in ("to_q", "to_k", "to_v"):
            plain = getattr(block.attn1, name)
            packed = torch.from_numpy(gguf.quants.quantize(plain.weight.detach().numpy(), kind))
            small = GGUFLinear(plain.in_features, plain.out_features, bias=True, compute_dtype=torch.float32)
            small.weight, small.bias = GGUFParameter(packed, quant_type=kind), plain.bias
            setattr(block.attn1, name, small)
    check(model, inputs, scheduler, denoise, speed_up)


def test_cache_dit_skips_whole_blocks(pipes, speed_up):
    """Blocks that the cache skips make no calls; those that run are sparse."""
    cache_dit = pytest.importorskip("cache_dit")
    tiny = pipes.wan()
    with speed_up(tiny.pipe, 0.22) as handle:
        tiny(8)
        every = handle.report().total.sparse
    cache_dit.enable_cache(
        tiny.pipe,
        cache_config=cache_dit.DBCacheConfig(
            Fn_compute_blocks=1, Bn_compute_blocks=0, residual_diff_threshold=10.0, max_warmup_steps=2
        ),
    )
    dense = tiny(8)
    with speed_up(tiny.pipe, 0.22) as handle:
        out = tiny(8)
        fewer = handle.report().total.sparse
    assert 0 < fewer < every and torch.isfinite(out).all()
    assert torch.equal(tiny(8), dense)
    cache_dit.disable_cache(tiny.pipe)
