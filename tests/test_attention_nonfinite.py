"""NaN and Inf pass as they do through dense attention: the same rows are lost, no others,
and nothing hangs."""

import math

import pytest
import torch

from residua import State, attention
from tests.support.oracle import masked_attention, paper, qkv, small

pytestmark = pytest.mark.usefixtures("every_backend")

VALUES = [math.nan, math.inf, -math.inf]
CONFIGS = [
    *(small(reconstruction=reconstruction) for reconstruction in ("anchored", "tail", "probe", "none")),
    small(partition="semantic"),
    small(score="centroid"),
    paper(score="centroid"),
    small(density=1),
    small(max_error=0.1),
]
RECONSTRUCTED = [small(), small(reconstruction="tail"), paper(), paper(probe_policy="random"), small(density=1)]


def lost_rows(out):
    return ~out.isfinite().all(-1)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_bad_query_row_loses_itself_alone(value, config):
    q, k, v = qkv()
    q[0, 0, 7, 3], q[0, 1, 100] = value, value
    out = attention(q, k, v, config)
    dense, _ = masked_attention(q, k, v)
    assert torch.equal(lost_rows(out), lost_rows(dense))
    assert lost_rows(out).sum() == 2


@pytest.mark.parametrize("config", CONFIGS)
def test_a_nan_key_loses_every_row_of_its_head(config):
    q, k, v = qkv(heads=4, kv_heads=2)
    k[0, 1, 33, 2] = math.nan
    out = attention(q, k, v, config)
    assert torch.equal(lost_rows(out), lost_rows(masked_attention(q, k, v)[0]))
    assert lost_rows(out)[0, 2:].all() and not lost_rows(out)[0, :2].any()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("config", RECONSTRUCTED)
def test_a_bad_value_loses_its_channel_in_every_row(value, config):
    """With reconstruction on, the summary or the probes see it even where its group is skipped."""
    q, k, v = qkv()
    v[0, 1, 33, 2] = value
    out = attention(q, k, v, config)
    dense, _ = masked_attention(q, k, v)
    assert torch.equal(lost_rows(out), lost_rows(dense))
    assert not out[0, 1, :, 2].isfinite().any()
    if config.reconstruction != "probe":  # a fitted map mixes the channels of a row
        assert torch.equal(out.isfinite(), dense.isfinite())


def test_these_calls_have_summaries():
    """Without, the tests here would say nothing about them."""
    for reconstruction in ("anchored", "tail"):
        _, receipt = attention(*qkv(), small(reconstruction=reconstruction), return_receipt=True)
        assert receipt.chosen["without summary"] == receipt.chosen["dense"] == 0


@pytest.mark.parametrize("value", VALUES)
def test_without_reconstruction_rows_that_skip_a_bad_value_are_bit_identical(value):
    q, k, v = qkv()
    clean = attention(q, k, v, small(reconstruction="none"))
    v[0, :, 33] = value
    out = attention(q, k, v, small(reconstruction="none"))
    lost = lost_rows(out)
    assert lost.any() and not lost.all()
    assert torch.equal(out[~lost], clean[~lost])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_it_ends_whatever_is_wrong(value, which):
    tensors = dict(zip("qkv", qkv(queries=120), strict=True))
    for name in which:
        tensors[name] = torch.full_like(tensors[name], value)
    state = State()
    for config in CONFIGS:
        out, receipt = attention(**tensors, config=config, state=state, return_receipt=True)
        assert out.shape == tensors["q"].shape and not out.isfinite().all()
        assert 0 < receipt.density <= 1 + 16 / 120  # every pair, and the probes on top


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("config", CONFIGS)
def test_an_infinite_key_loses_the_rows_that_dense_attention_loses(value, config):
    """It outweighs all else for some rows and is nothing to others, whatever their group's mean says."""
    q, k, v = qkv()
    k[0, 0, 33, 2] = value
    dense, _ = masked_attention(q, k, v)
    assert lost_rows(dense)[0, 0].any() and not lost_rows(dense)[0, 0].all()
    assert torch.equal(lost_rows(attention(q, k, v, config)), lost_rows(dense))


@pytest.mark.parametrize("reconstruction", ["anchored", "tail", "probe"])
def test_nan_in_a_query_is_not_carried_to_the_error_estimate_in_silence(reconstruction):
    q, k, v = qkv()
    q[0, 0] = math.nan
    _, receipt = attention(q, k, v, small(reconstruction=reconstruction), return_receipt=True)
    assert math.isnan(receipt.error)
    assert receipt.error_per_head[0, 0].isnan() and receipt.error_per_head[0, 1].isfinite()
