"""Grouped-query attention: one K/V partition per K/V head, everything else per query head."""

import importlib
from dataclasses import replace

import pytest
import torch

from residua import Partition, State, attention
from residua.method.grouping.partition import group_tokens
from residua.method.inputs import validate
from residua.method.stages import SizedCall
from residua.ops.backend import Backend
from tests.support.oracle import expand_heads, masked_attention, qkv, small, worst

pytestmark = pytest.mark.usefixtures("every_backend")


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (6, 1), (3, 3)])
def test_it_equals_expanded_heads_where_the_partition_is_the_same(heads, kv_heads):
    """The semantic K/V partition does not look at queries, so expanded heads find the shared one again.
    (Heads that share keys also share the directions of the drift, and the mean query and the cost of the
    centres of the tail, so these are left out here.)"""
    q, k, v = qkv(2, heads, kv_heads)
    reconstructions = ({"drift_rank": 0}, {"reconstruction": "probe"}, {"reconstruction": "none"})
    for settings in (*reconstructions, {"score": "centroid", "drift_rank": 0}, {"density": 1}):
        config = small(partition="semantic", **settings)
        shared, receipt = attention(q, k, v, config, return_receipt=True)
        expanded, other = attention(q, expand_heads(k, heads), expand_heads(v, heads), config, return_receipt=True)
        assert torch.allclose(shared, expanded, atol=1e-5)
        assert torch.equal(receipt.per_head.total, other.per_head.total)


@pytest.mark.parametrize("settings", [{"drift_rank": 0}, {"reconstruction": "probe"}])
def test_it_equals_expanded_heads_with_the_shared_partition_handed_over(monkeypatch, settings):
    """Response partition: expanded heads are given the shared K/V groups, and all that follows must agree."""
    q, k, v = qkv(1, 4, 2)
    config = small(**settings)
    shared = attention(q, k, v, config)
    call = validate(q, k, v)
    grouping = group_tokens(SizedCall.of(call, config, Backend()))

    def handed_over(*_, **__):
        kv = Partition.from_labels(expand_heads(grouping.kv.labels, 4), grouping.kv.groups)
        return replace(grouping, kv=kv, kv_centroids=expand_heads(grouping.kv_centroids, 4))

    # by its module name: the package gives that name to the function
    monkeypatch.setattr(importlib.import_module("residua.api"), "group_again", handed_over)
    expanded = attention(q, expand_heads(k, 4), expand_heads(v, 4), config)
    assert torch.allclose(shared, expanded, atol=1e-5)


def test_heads_that_share_keys_share_the_partition_only():
    q, k, v = qkv(1, 4, 2)
    call, config = validate(q, k, v), small()
    grouping = group_tokens(SizedCall.of(call, config, Backend()))
    assert grouping.kv.labels.shape[:2] == (1, 2) and grouping.query.labels.shape[:2] == (1, 4)
    assert not torch.equal(grouping.query.labels[0, 0], grouping.query.labels[0, 1])


def test_the_metric_is_that_of_all_rows_of_the_sharing_heads():
    """Stacking the rows of two heads behind each other in one head gives the same K/V groups."""
    q, k, v = qkv(1, 2, 1, 200, 220)
    config = small(metric_rows=4096)
    call = validate(q, k, v)
    shared = group_tokens(SizedCall.of(call, config, Backend()))
    stacked = validate(q.flatten(1, 2)[:, None], k, v)
    alone = group_tokens(SizedCall.of(stacked, config, Backend()))
    assert torch.equal(shared.kv.labels, alone.kv.labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_density_one(dtype):
    q, k, v = qkv(2, 6, 2, dtype=dtype)
    out = attention(q, k, v, small(density=1), exact_queries=(0, 9), pinned_keys=(3, 8))
    assert worst(out, masked_attention(q, k, v)[0]) < (1e-6 if dtype == torch.float32 else 4e-3)


def test_warm_runs():
    state, tensors = State(), qkv(1, 4, 2)
    attention(*tensors, small(), state)
    out, receipt = attention(*tensors, small(), state, return_receipt=True)
    assert receipt.warm and out.isfinite().all()
