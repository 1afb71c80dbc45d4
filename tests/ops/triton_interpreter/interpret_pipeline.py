"""The whole attention call in the interpreter: every stage through the kernels, beside `torch`."""

from __future__ import annotations

import pytest
import torch
from cases import random

import residua
from residua.api import attend_route
from residua.ops import self_test
from residua.ops.triton.backend import TritonBackend
from residua.types import Choice, Partition, Route

# The rules of a GPU: what users of these kernels run. So short a call pays for anchors at small ranks only.
SETTINGS = {
    "rules": "gpu",
    "query_groups": 5,
    "kv_groups": 11,
    "query_rank": 8,
    "drift_rank": 4,
    "kmeans_cold": 3,
    "probes": 8,
    "residual_rank": 4,
    "density": 0.4,
}


def call(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tokens with structure, so that clusters and routes do not hang on rounding."""
    centres = random(1, 1, 6, 32, seed=9) * 0.8
    mix = centres[:, :, torch.arange(150) * 6 // 150]
    q = (mix + 0.2 * random(1, 4, 150, 32)).to(dtype)
    k = (mix + 0.2 * random(1, 2, 150, 32, seed=1)).to(dtype)
    return q, k, random(1, 2, 150, 32, dtype=dtype, seed=2)


@pytest.mark.parametrize(
    "options",
    [{}, {"pinned_keys": (140, 150), "exact_queries": (140, 150), "key_mask": torch.arange(150)[None] != 17}],
    ids=["plain", "text tokens"],
)
def test_a_call_equals_that_of_torch(options):
    q, k, v = call(torch.float32)
    states = residua.State(), residua.State()
    for warm in (False, True):
        found = []
        for state, backend in zip(states, ("triton", "torch"), strict=True):
            config = residua.Config(backend=backend, **SETTINGS)
            out, receipt = residua.attention(q, k, v, config, state, return_receipt=True, **options)
            assert receipt.backend == backend
            assert receipt.warm == warm
            found.append((out, receipt))
        (out, receipt), (wanted, wanted_receipt) = found
        assert receipt.pairs == wanted_receipt.pairs
        torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
        assert receipt.error == pytest.approx(wanted_receipt.error, rel=1e-2)
        assert receipt.error > 1e-3  # there is something to approximate


def test_heads_whose_scores_an_expansion_leaves_out_do_without_one():
    """The guard that is asked before a summary is made (docs/decisions/0016-concentrated-heads.md)."""
    q, k, v = call(torch.float32)
    q = q * torch.tensor([1.0, 40.0, 1.0, 40.0]).view(1, 4, 1, 1)
    choices = []
    for backend in ("triton", "torch"):
        config = residua.Config(backend=backend, **SETTINGS)
        out, receipt = residua.attention(q, k, v, config, return_receipt=True)
        choices.append(receipt.choice_per_head.tolist())
        assert out.isfinite().all()
    assert choices[0] == choices[1]
    assert [choice == Choice.WITHOUT_SUMMARY for choice in choices[0][0]] == [False, True, False, True]


def test_half_precision_stays_near_dense_attention():
    q, k, v = call(torch.float16)
    config = residua.Config(backend="triton", **{**SETTINGS, "density": 0.9})
    out = residua.attention(q, k, v, config)
    dense = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), enable_gqa=True)
    assert out.dtype == torch.float16
    assert (out - dense).norm() / dense.norm() < 0.02


def test_the_raw_operator_takes_it_by_name():
    q, k, v = call(torch.float32)
    query = Partition.from_labels((torch.arange(150) // 40).expand(1, 4, 150), 4)
    kv = Partition.from_labels((torch.arange(150) // 20).expand(1, 2, 150), 8)
    route = Route(query, kv, torch.rand(1, 4, 4, 8, generator=torch.Generator().manual_seed(0)) < 0.5)
    for got, wanted in zip(
        attend_route(q, k, v, route, backend="triton"), attend_route(q, k, v, route, backend="reference"), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_the_kernels_pass_the_test_that_decides_on_a_gpu_whether_they_are_used():
    checks = self_test.run_self_test(TritonBackend(), torch.device("cpu"), ((2, 1, 65, 90, 32),))
    assert [check for check in checks if not check.passed] == []
