"""Whole warm calls on CUDA tensors without memory: no host read, no mixed devices, and within their budgets.

Such a tensor has a device and no values, so whatever reads one on the host fails; launches are recorded.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from residua.bench.static.fake_cuda import fake_cuda
from residua.bench.static.trace import Trace, trace_call
from residua.config import Config

WAN = {"tokens": 75600, "heads": 40, "head_dim": 128}


def assert_stays_on_the_device(trace: Trace) -> None:
    assert trace.waits == []
    assert trace.mixed == []
    assert {launch.name for launch in trace.launches} >= {"assign", "project", "attend", "key_tiles"}


@pytest.fixture(scope="module")
def default() -> Trace:
    return trace_call(Config(), **WAN)


def test_the_default_call_is_a_few_hundred_launches(default):
    assert_stays_on_the_device(default)
    assert default.kernels <= 410
    assert default.peak_bytes <= 5 << 30


def test_torch_moves_little_beside_the_kernels(default):
    assert sum(op.bytes for op in default.operations) <= 9e9


def test_keys_are_gathered_once(default):
    """Key and value copies in group order: one launch each, whoever needs them."""
    whole = [x for x in default.launches if x.name == "permute" and x.arguments["OUT"].sizes[2] == 75600]
    assert len(whole) == 2


def test_cells_are_ranked_once(default):
    assert sum(op.name == "sort" for op in default.operations) == 1


def test_no_float_is_added_by_atomics(default):
    """Only the slots' own masses still go through torch's scatter_add_, which adds in any order."""
    unordered = {"index_add", "index_add_", "scatter_add", "index_put_"}
    assert not {op.name for op in default.operations} & unordered


def test_a_short_call_launches_no_more_than_a_long_one(default):
    short = trace_call(Config(), tokens=8192, heads=24, head_dim=128)
    assert_stays_on_the_device(short)
    assert short.kernels <= default.kernels


@pytest.mark.parametrize("reconstruction", ["tail", "probe", "none"])
def test_every_reconstruction(reconstruction):
    trace = trace_call(Config(reconstruction=reconstruction), tokens=16384, heads=8, head_dim=128)
    assert_stays_on_the_device(trace)
    assert trace.kernels <= 600


@pytest.mark.parametrize("dim", [64, 72, 80, 96])
def test_head_dims(dim):
    assert_stays_on_the_device(trace_call(Config(), tokens=16384, heads=8, head_dim=dim))


def test_grouped_queries_text_and_padding():
    trace = trace_call(Config(), tokens=16384, heads=8, kv_heads=2, head_dim=128, text=512)
    assert_stays_on_the_device(trace)


def test_a_read_of_a_value_would_be_noticed():
    with fake_cuda(), pytest.raises(Exception, match=r"data-dependent|_local_scalar_dense|item"):
        torch.ones(3, device="cuda").sum().item()
