"""Whole calls on a GPU: equal to the CPU's, free of host reads, deterministic, in bounded memory."""

import linecache
import warnings

import pytest
import torch

import residua
from residua.ops.backend import Demand
from residua.ops.select import backends
from residua.tools.synthetic import VideoLike, video_like


def names(dtype, dim):
    demand = Demand(torch.device("cuda"), dtype, dim, dim)
    return [b.name for b in backends().values() if b.name != "reference" and not b.reasons(demand)]


def test_triton_takes_calls_on_this_gpu():
    assert "triton" in names(torch.bfloat16, 128)


def test_every_backend_is_near_dense_attention(device):
    q, k, v = (x.to(device) for x in video_like(VideoLike((8, 32, 32), 3, 128), torch.bfloat16))
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in (q, k, v)))
    errors = {}
    for name in names(torch.bfloat16, 128):
        out, receipt = residua.attention(q, k, v, residua.Config(backend=name), return_receipt=True)
        assert receipt.backend == name
        errors[name] = float(((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean())
    # the approximation is the method's; no backend may add to it
    assert max(errors.values()) < 1.1 * errors["torch"] + 1e-3, errors


@pytest.mark.parametrize("text", [False, True])
def test_a_warm_triton_call_reads_nothing_back(device, text):
    q, k, v = (x.to(device) for x in video_like(VideoLike((4, 32, 32), 2, 64), torch.bfloat16))
    options = {"pinned_keys": (0, 64), "exact_queries": (0, 64)} if text else {}
    state, config = residua.State(), residua.Config(backend="triton")
    residua.attention(q, k, v, config, state, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            residua.attention(q, k, v, config, state, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = {linecache.getline(wait.filename, wait.lineno).strip() for wait in waits}
    # torch looks at the error code of its eigensolver; nothing of ours may wait
    assert all("linalg.eigh" in line for line in lines), lines


def test_repeats_are_bit_identical(device):
    q, k, v = (x.to(device) for x in video_like(VideoLike((4, 32, 32), 2, 128), torch.bfloat16))
    config = residua.Config(backend="triton")
    first = residua.attention(q, k, v, config)
    assert all(torch.equal(first, residua.attention(q, k, v, config)) for _ in range(5))


def test_a_video_of_75600_tokens_in_bounded_memory(device):
    free, _ = torch.cuda.mem_get_info()
    if free < 8 << 30:
        pytest.skip(f"needs 8 GiB of free memory, there are {free >> 30}")
    q, k, v = (torch.randn(1, 4, 75600, 128, dtype=torch.bfloat16, device=device) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = residua.attention(q, k, v, residua.Config(backend="triton"))
    assert torch.isfinite(out).all()
    held = sum(x.numel() * x.element_size() for x in (q, k, v, out))
    assert torch.cuda.max_memory_allocated() - before < 12 * held
