"""The noise floor: the same attention in another order, and nothing else changed."""

import numpy as np
import pytest
import torch

from residua.hosts.diffusers import accelerate
from residua.hosts.diffusers.layer import AttentionLayer
from residua.tools.capture.recording import dense_on_purpose
from residua.tools.generate.compare import compare, generate_once, measure_noise_floor
from residua.tools.generate.noise_floor import _rolled, another_order, noise_floor_text
from residua.tools.generate.run import generate
from residua.tools.metrics.video_quality import VideoQuality


def dense_again(pipe, request):
    return generate_once(pipe, request, reordered=True).clip.frames


def test_a_second_dense_run_differs_by_rounding_and_by_no_more(pipe, request_small):
    first = generate(pipe, request_small).frames
    again = dense_again(pipe, request_small)
    gap = np.abs(again - first).max()
    assert 0 < gap < 1e-3
    np.testing.assert_array_equal(dense_again(pipe, request_small), again)  # it repeats
    np.testing.assert_array_equal(generate(pipe, request_small).frames, first)  # and leaves nothing behind


def test_every_self_attention_call_is_rolled(pipe, request_small, monkeypatch):
    seen = []
    dispatch = AttentionLayer.dispatch

    def recorded(self, q, k, v, *more):
        seen.append((k.clone(), v.clone()))
        return dispatch(self, q, k, v, *more)

    monkeypatch.setattr(AttentionLayer, "dispatch", recorded)
    with dense_on_purpose(), accelerate(pipe, dense_layers=1.0, min_tokens=0):
        generate(pipe, request_small)
    plain, seen[:] = list(seen), []
    with another_order(pipe):
        generate(pipe, request_small)
    assert len(seen) == len(plain) == request_small.steps * len(pipe.transformer.blocks)
    for before, after in zip(plain[0], seen[0], strict=True):  # the first call, before rounding differs
        assert torch.equal(after, before.roll(before.shape[1] // 2, 1))
    assert all(not torch.equal(before[0], after[0]) for before, after in zip(plain, seen, strict=True))


@pytest.mark.parametrize("shape", [(2, 10), (2, 1, 1, 10), (2, 1, 6, 10)], ids=str)
def test_rolling_the_keys_with_their_mask_is_the_same_attention(shape):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 3, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 10, 3, 8, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[..., 0] = True
    asked = []

    def dispatch(q, k, v, mask, scale, causal):
        asked.append(k)
        full = None if mask is None else mask if mask.ndim == 4 else mask[:, None, None]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, full, scale=scale, is_causal=causal)
        return out.transpose(1, 2)

    torch.testing.assert_close(_rolled(dispatch)(q, k, v, mask, 0.3, False), dispatch(q, k, v, mask, 0.3, False))
    assert torch.equal(asked[0], k.roll(5, 1)) and torch.equal(asked[1], k)
    _rolled(dispatch)(q, k, v, None, 0.3, True)
    assert torch.equal(asked[2], k)  # a causal call has an order


def test_a_comparison_has_its_floor_where_it_is_asked_for(pipe, request_small, settings):
    names = []

    def watch(name):
        names.append(name)
        return lambda done, total: None

    found = compare(pipe, "world", request_small, settings, lpips="none", watch=watch, noise_floor=True)
    assert names.count("dense again") == 1
    assert found.noise_floor.psnr > 60 and found.to_dict()["floor"]["psnr"] == found.noise_floor.psnr
    assert found.noise_floor.not_measured == {"lpips": "none"}
    without = compare(pipe, "world", request_small, settings, lpips="none", watch=watch)
    assert without.noise_floor is None and without.to_dict()["floor"] is None


def test_what_is_said_of_a_floor(pipe, request_small):
    first = generate(pipe, request_small)
    found = measure_noise_floor(pipe, request_small, first, "no weights", lambda done, total: None)
    assert noise_floor_text(found) == f"{found.psnr:.1f} dB" and noise_floor_text(found, "lpips") is None
    same = VideoQuality(None, 1.0, None, None, not_measured={"psnr": "the videos are identical: no finite value"})
    assert noise_floor_text(same) == "identical" and noise_floor_text(same, "ssim", "{:.4f}") == "1.0000"
