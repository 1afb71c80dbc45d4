"""Text tokens and padding: pinned keys, exact query rows and masks against dense masked attention."""

import math

import pytest
import torch

from residua import Config, attention
from residua.method.grouping.partition import group_tokens
from residua.method.inputs import validate
from residua.method.route import route_cells
from residua.method.stages import SizedCall
from residua.ops.backend import Backend
from residua.tools.metrics.row_error import row_errors
from residua.tools.synthetic import VideoLike, video_like
from tests.support.making import in_groups
from tests.support.oracle import masked_attention, normal, paper, qkv, route_mask, small, worst

pytestmark = pytest.mark.usefixtures("every_backend")

MASK = torch.arange(260)[None] < torch.tensor([[260], [231]])
SPANS = [
    {"pinned_keys": (240, 260)},
    {"exact_queries": (0, 12)},
    {"key_mask": MASK},
    {"pinned_keys": [(0, 3), (250, 260)], "exact_queries": [(0, 3), (230, 240)], "key_mask": MASK},
    {"pinned_keys": (0, 259), "exact_queries": (0, 239)},  # one free row, one free key
]


def call(dtype=torch.float32):
    return qkv(2, 4, 2, 240, 260, dtype=dtype)


def as_mask(spans):
    """[B, H, Nq, Nk] for dense attention: text tokens do not change it, padding does."""
    return spans.get("key_mask", torch.ones(2, 260, dtype=torch.bool))[:, None, None].expand(2, 4, 240, 260)


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_density_one_is_masked_dense(spans, dtype, backend):
    q, k, v = call(dtype)
    dense, _ = masked_attention(q, k, v, as_mask(spans))
    out, receipt = attention(q, k, v, small(density=1, backend=backend), **spans, return_receipt=True)
    assert worst(out, dense) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert receipt.density == pytest.approx(1.0)
    assert receipt.pairs.possible == int(as_mask(spans).sum())


@pytest.mark.parametrize("spans", SPANS)
def test_at_a_low_density_rows_see_their_cells_and_every_pinned_key(spans):
    q, k, v = call()
    config = small(density=0.4, reconstruction="none")
    out, receipt = attention(q, k, v, config, **spans, return_receipt=True)
    checked = validate(q, k, v, **spans)
    grouping = group_tokens(SizedCall.of(checked, config, Backend()))
    route = route_cells(in_groups(checked, grouping, config=config.replace(density=0.4), probes=0)).route
    seen = route_mask(route, 240, 260)
    for start, stop in checked.pinned_keys.ranges:
        seen[..., start:stop] = True
    for start, stop in checked.exact_queries.ranges:
        seen[:, :, start:stop] = True
    seen &= as_mask(spans)
    assert worst(out, masked_attention(q, k, v, seen)[0]) < 1e-6
    assert receipt.pairs.total == int(seen.sum())  # every pair that was computed, and no other


@pytest.mark.parametrize("spans", SPANS[:4])
def test_accounting_at_the_papers_density(spans):
    q, k, v = call()
    _, receipt = attention(q, k, v, paper(density=0.22, probes=8), **spans, return_receipt=True)
    checked = validate(q, k, v, **spans)
    keys = as_mask(spans)[:, 0, 0].sum(-1)[:, None]  # [B, 1]
    assert torch.equal(receipt.per_head.exact, (checked.exact_queries.count * keys).expand(2, 4))
    assert torch.equal(receipt.per_head.probe, (8 * keys).expand(2, 4))
    assert (receipt.per_head.total <= 0.22 * receipt.per_head.possible).all()
    assert receipt.density <= 0.22
    assert all("estimated error" in note for note in receipt.notes)  # noise cannot be reconstructed


def test_text_that_costs_more_than_the_budget_is_still_computed_and_said():
    q, k, v = call()
    out, receipt = attention(q, k, v, small(density=0.22, probes=0), pinned_keys=(0, 100), return_receipt=True)
    assert receipt.density > 0.22 and out.isfinite().all()
    assert any("pinned keys" in note and "above the target" in note for note in receipt.notes)


@pytest.mark.parametrize("density, text, over", [(0.22, 270, True), (0.3, 60, False)])
def test_text_does_not_starve_a_fixed_density(density, text, over):
    """270 rows of text take all of 22 %; the rest gets half as much. Without that its error would be 0.92."""
    video = video_like(VideoLike((8, 16, 16), heads=2, head_dim=64))
    q, k, v = (torch.cat([x, normal(1, 2, text, 64, seed=3)], dim=2) for x in video)
    spans = {"pinned_keys": (2048, 2048 + text), "exact_queries": (2048, 2048 + text)}
    out, receipt = attention(q, k, v, Config(density=density), **spans, return_receipt=True)
    mean, _ = row_errors(out[:, :, :2048], masked_attention(q, k, v)[0][:, :, :2048])
    assert mean < 0.2
    held = receipt.costs["pinned"] + receipt.costs["exact"]
    assert receipt.cost <= max(density, held + (1 - held) * density / 2)
    assert (held > density / 2) == over == any("above the target" in note for note in receipt.notes)


def test_in_the_papers_method_text_pays_like_any_pair():
    q, k, v = call()
    config = paper(density=0.6, probes=4)
    _, receipt = attention(q, k, v, config, pinned_keys=(160, 260), return_receipt=True)
    assert receipt.costs["pinned"] > 0.3 and 0.55 < receipt.density <= 0.6


def test_exact_rows_are_dense_whatever_the_density():
    q, k, v = call()
    spans = {"exact_queries": [(5, 9), (200, 240)], "key_mask": MASK}
    dense, _ = masked_attention(q, k, v, as_mask(spans))
    out = attention(q, k, v, small(density=0.3), **spans)
    for start, stop in spans["exact_queries"]:
        assert worst(out[:, :, start:stop], dense[:, :, start:stop]) < 1e-6
    assert worst(out, dense) > 1e-3


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("pinned", [None, (245, 260)])
def test_padding_may_hold_anything(value, pinned):
    q, k, v = call()
    hidden = ~MASK[:, None, :, None]
    spans = {"key_mask": MASK, "pinned_keys": pinned}
    clean = attention(q, torch.where(hidden, 0.0, k), torch.where(hidden, 0.0, v), small(), **spans)
    dirty = attention(q, torch.where(hidden, value, k), torch.where(hidden, value, v), small(), **spans)
    assert clean.isfinite().all() and torch.equal(clean, dirty)


def test_padding_is_as_if_it_were_not_there():
    q, k, v = call()
    padded = attention(q, k, v, small(), key_mask=MASK[1:].expand(2, -1))
    cut = attention(q, k[:, :, :231], v[:, :, :231], small())
    assert torch.allclose(padded, cut, atol=1e-5)


def test_a_mask_of_true_changes_nothing():
    q, k, v = call()
    everything = torch.ones(2, 260, dtype=torch.bool)
    assert torch.equal(attention(q, k, v, small(), key_mask=everything), attention(q, k, v, small()))


def test_a_batch_of_padding_alone_gives_zeros():
    q, k, v = call()
    mask = torch.stack([torch.ones(260, dtype=torch.bool), torch.zeros(260, dtype=torch.bool)])
    for config in (small(), small(density=1), small(reconstruction="none")):
        out, receipt = attention(q, k, v, config, key_mask=mask, exact_queries=(0, 5), return_receipt=True)
        assert not out[1].any() and out[0].isfinite().all() and out[0].any()
        assert receipt.pairs.possible == 4 * 240 * 260


def test_nothing_free_is_dense_and_said():
    q, k, v = call()
    dense, _ = masked_attention(q, k, v)
    for spans in ({"pinned_keys": (0, 260)}, {"exact_queries": (0, 240)}):
        out, receipt = attention(q, k, v, small(), **spans, return_receipt=True)
        assert worst(out, dense) < 1e-6
        assert receipt.density == 1.0 and any("every pair was evaluated" in note for note in receipt.notes)


def test_pinned_keys_matter():
    """A key that no centroid would choose, but that decides some rows."""
    q, k, v = call()
    k[:, :, 255], v[:, :, 255] = 6 * normal(16, seed=3), 20.0
    dense, _ = masked_attention(q, k, v)
    config = small(density=0.15, reconstruction="none")
    free = (attention(q, k, v, config) - dense).norm()
    pinned = (attention(q, k, v, config, pinned_keys=(255, 256)) - dense).norm()
    assert pinned < free
