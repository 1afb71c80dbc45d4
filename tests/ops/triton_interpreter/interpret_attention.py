"""Sparse attention, probe rows and the reconstruction in the interpreter, against fp64 on the same route."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import assert_near, attention_truth, dense_mask, generator, ragged, random, random_drift, random_route

from dev.gpu_model.route import _runs, pack
from residua.ops.backend import Backend, Demand
from residua.ops.triton import TritonBackend
from residua.ops.triton.drift import drift_rows
from residua.ops.triton.rows import split_keys
from residua.ops.triton.schedule import SPLIT_BITS, SPLIT_MASK, schedule_tiles
from residua.ops.triton.shapes import FALLBACK_PROCESSORS, imagined_gpu
from residua.types import MAX_BEND, Partition, Route, SummaryKeys

BASE = Backend()

BACKEND = TritonBackend()


def check(q, k, v, route, summary=None):
    scale = q.shape[-1] ** -0.5
    wanted, wanted_lse = attention_truth(q, k, v, dense_mask(route), scale, route, summary)
    out, lse = BACKEND.attend(q, k, v, route, scale, summary, torch.float32)
    assert_near(out, wanted, q.dtype)
    assert_near(lse, wanted_lse, q.dtype)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys", "dim", "value_dim"),
    [
        (2, 2, 130, 97, 64, 64),
        (2, 1, 97, 150, 96, 96),
        (1, 1, 63, 110, 128, 128),
        (1, 1, 40, 61, 256, 256),
        (1, 1, 33, 70, 20, 48),
    ],
)
def test_attention(dtype, heads, kv_heads, queries, keys, dim, value_dim):
    q = random(2, heads, queries, dim, dtype=dtype)
    k, v = (random(2, kv_heads, keys, d, dtype=dtype, seed=s) for d, s in ((dim, 1), (value_dim, 2)))
    route = random_route(
        ragged(2, heads, queries, 5, loose=True), ragged(2, kv_heads, keys, 9, loose=True, seed=5), 0.4
    )
    out, lse = check(q, k, v, route)
    nothing = ~dense_mask(route).any(-1)
    assert nothing.any()
    assert torch.equal(out[nothing], torch.zeros_like(out[nothing]))
    assert torch.isneginf(lse[nothing]).all()
    again, lse_again = BACKEND.attend(q, k, v, route, dim**-0.5, None, torch.float32)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("extra_dtype", [torch.float32, torch.float16])
def test_extra_keys(dtype, extra_dtype):
    heads, queries, keys, dim, groups, extras = 2, 70, 90, 64, 4, 19
    q, k, v = (
        random(1, n, t, dim, dtype=dtype, seed=i) for i, (n, t) in enumerate([(heads, queries), (1, keys), (1, keys)])
    )
    route = random_route(ragged(1, heads, queries, groups, loose=True), ragged(1, 1, keys, 7), 0.3)
    weight = random(1, heads, groups, extras, seed=5)
    weight[..., 3] = -torch.inf
    summary = SummaryKeys(
        random(1, heads, groups, extras, dim, dtype=extra_dtype, seed=3),
        random(1, heads, groups, extras, dim, dtype=extra_dtype, seed=4),
        weight,
    )
    check(q, k, v, route, summary)
    # a key that is switched off may hold anything
    summary.keys[..., 3, :], summary.values[..., 3, :] = torch.nan, torch.inf
    assert torch.isfinite(BACKEND.attend(q, k, v, route, dim**-0.5, summary)[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("dim", "rank"), [(64, 16), (20, 5), (256, 16)])
def test_drift(dtype, dim, rank):
    heads, queries, keys, groups, extras = 2, 50, 60, 4, 19
    q, k, v = (
        random(1, n, t, dim, dtype=dtype, seed=i) for i, (n, t) in enumerate([(heads, queries), (1, keys), (1, keys)])
    )
    route = random_route(ragged(1, heads, queries, groups, loose=True), ragged(1, 1, keys, 7), 0.3)
    weight = random(1, heads, groups, extras, seed=5)
    weight[..., 3] = -torch.inf
    weight[:, :, 1] = -torch.inf  # a group whose keys are all off
    drift = random_drift(1, heads, 1, groups, dim, rank)
    pairs = [random(1, heads, groups, extras, dim, seed=s) for s in (3, 4)]
    out, lse = check(q, k, v, route, SummaryKeys(*pairs, weight, drift))
    still, still_lse = BACKEND.attend(q, k, v, route, dim**-0.5, SummaryKeys(*pairs, weight), torch.float32)
    labels = route.query.labels
    moves = (weight > -torch.inf).any(-1).gather(2, labels.clamp(min=0)) & (labels >= 0)
    assert ((out - still).abs().amax(-1) > 1e-3)[moves].all()
    assert torch.equal(out[~moves], still[~moves])
    assert torch.equal(lse[~moves], still_lse[~moves])
    # where every key is off, the drift may hold anything
    for part in (drift.origin, drift.curve, drift.slope):
        part[:, :, 1] = torch.nan
    again, lse_again = BACKEND.attend(q, k, v, route, dim**-0.5, SummaryKeys(*pairs, weight, drift), torch.float32)
    assert torch.equal(again, out)
    assert torch.equal(lse_again, lse)


@pytest.mark.parametrize(("dim", "value_dim"), [(128, 128), (64, 64), (72, 96), (20, 40)])
@pytest.mark.parametrize("kind", ["no summary", "summary", "drift"])
def test_low_tiles_of_gpus_whose_warps_multiply_alone(kind, dim, value_dim):
    """There a low tile keeps its output in two halves."""
    heads, queries, keys, groups, slots = 2, 170, 90, 4, 19
    q = random(1, heads, queries, dim, dtype=torch.float16)
    k, v = (random(1, 1, keys, d, dtype=torch.float16, seed=s) for d, s in ((dim, 1), (value_dim, 2)))
    route = random_route(ragged(1, heads, queries, groups, loose=True), ragged(1, 1, keys, 7), 0.3)
    drift = None
    if kind == "drift":
        drift = random_drift(1, heads, 1, groups, dim, 16)
        drift = replace(drift, slope=random(1, heads, groups, 16, value_dim, seed=14) / 16)
    weight = random(1, heads, groups, slots, seed=5)
    pairs = [random(1, heads, groups, slots, d, dtype=torch.float16, seed=d) for d in (dim, value_dim)]
    with imagined_gpu(89):
        check(q, k, v, route, None if kind == "no summary" else SummaryKeys(*pairs, weight, drift))


def test_coordinates_of_16_bit_rows_keep_the_digits_of_fp32():
    """Rows and origin are far from 0 and near each other."""
    q = (random(1, 2, 70, 64) / 8 + 3).half()
    query = ragged(1, 2, 70, 4, loose=True)
    drift = random_drift(1, 2, 1, 4, 64, 16)
    drift.origin.copy_((q.float() @ drift.basis).mean(2, keepdim=True).expand_as(drift.origin))
    labels = query.labels.clamp(min=0)[..., None]
    wanted = q.double() @ drift.basis.double() - torch.take_along_dim(drift.origin, labels, 2).double()
    bend = (wanted.square() * torch.take_along_dim(drift.curve, labels, 2)).sum(-1).clamp(max=MAX_BEND)
    y, got = drift_rows(q, drift, query)
    grouped = query.labels >= 0
    assert (y - wanted)[grouped].abs().max() < 1e-5
    assert (got - bend)[grouped].abs().max() < 1e-5


@pytest.mark.parametrize("scale", [0.125, -0.125, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_drift_that_the_kernel_finds_itself_keeps_the_digits_of_fp32(dtype, scale):
    """Where nothing is kept, the log-sum-exp over one key of 0 is how far the drift bends its weight."""
    q = (random(1, 2, 70, 64) / 8 + 3).to(dtype)
    query, kv = ragged(1, 2, 70, 4), ragged(1, 1, 20, 3)
    k = v = random(1, 1, 20, 64, dtype=dtype)
    drift = random_drift(1, 2, 1, 4, 64, 16)
    drift.origin.copy_((q.float() @ drift.basis).mean(2, keepdim=True).expand_as(drift.origin))
    labels = query.labels[..., None]
    y = q.double() @ drift.basis.double() - torch.take_along_dim(drift.origin, labels, 2).double()
    bend = (y.square() * torch.take_along_dim(drift.curve, labels, 2)).sum(-1).clamp(max=MAX_BEND)
    nothing = torch.zeros(1, 2, 4, 1, 64)
    route = random_route(query, kv, 0.0)
    _, lse = BACKEND.attend(q, k, v, route, scale, SummaryKeys(nothing, nothing, nothing[..., 0], drift))
    assert (lse - bend).abs().max() < 2e-5


def test_keys_of_16_bits_lose_nothing_beside_large_log_weights():
    """The weight cancels the product: what the cast of the key drops must not remain in the exponent."""
    q = random(1, 1, 16, 64, dtype=torch.float16) + 3
    k = v = random(1, 1, 5, 64, dtype=torch.float16)
    one = Partition.from_labels(torch.zeros(1, 1, 16, dtype=torch.long), 1)
    route = Route(
        one, Partition.from_labels(torch.zeros(1, 1, 5, dtype=torch.long), 1), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    )
    keys = random(1, 1, 1, 3, 64, seed=7) * 3 + 5
    anchor = q.float().mean(2)  # [1, 1, D]
    summary = SummaryKeys(keys, random(1, 1, 1, 3, 64, seed=8), -(keys @ anchor[..., None, :, None])[..., 0] * 64**-0.5)
    wanted, _ = attention_truth(q, k, v, dense_mask(route), 64**-0.5, route, summary)
    out, _ = BACKEND.attend(q, k, v, route, 64**-0.5, summary, torch.float32)
    rough = SummaryKeys(keys.half(), summary.values, summary.log_weight)
    careless, _ = BACKEND.attend(q, k, v, route, 64**-0.5, rough, torch.float32)
    assert (out - wanted).abs().max() < 0.25 * (careless - wanted).abs().max()


def test_nothing_kept_everything_kept_and_one_huge_group():
    q, k, v = random(1, 1, 150, 32), random(1, 1, 140, 32, seed=1), random(1, 1, 140, 32, seed=2)
    huge = Partition.from_labels(torch.where(torch.arange(150) == 77, 1, 0)[None, None], 3)
    kv = Partition.from_labels(torch.where(torch.arange(140) == 5, 2, 0)[None, None], 3)
    for fill in (True, False):
        check(q, k, v, Route(huge, kv, torch.full((1, 1, 3, 3), fill)))
    only_first = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    only_first[..., 0] = True
    out, _ = check(q, k, v, Route(huge, kv, only_first))
    dense, _ = attention_truth(q, k, v, torch.ones(1, 1, 150, 140, dtype=torch.bool), 32**-0.5)
    assert (out - dense).abs().max() > 1e-3


def test_strided_views_equal_contiguous_ones():
    packed = random(1, 60, 3, 2, 48, dtype=torch.float16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    route = random_route(ragged(1, 2, 60, 3), ragged(1, 2, 60, 5, seed=3), 0.5)
    out, lse = BACKEND.attend(q, k, v, route, 0.1)
    assert out.dtype == torch.float16
    for got, wanted in zip(
        (out, lse), BACKEND.attend(q.contiguous(), k.contiguous(), v.contiguous(), route, 0.1), strict=True
    ):
        assert torch.equal(got, wanted)


def test_large_logits_stay_finite_and_nan_reaches_only_the_rows_that_see_it():
    q, k, v = random(1, 1, 40, 16) * 100, random(1, 1, 50, 16, seed=1) * 100, random(1, 1, 50, 16, seed=2)
    route = random_route(ragged(1, 1, 40, 4), ragged(1, 1, 50, 5, seed=2), 0.5)
    check(q, k, v, route)
    clean, _ = BACKEND.attend(q, k, v, route, 0.25)
    sees = dense_mask(route)[0, 0, :, 9]
    v[:, :, 9] = k[:, :, 9] = torch.nan
    out, _ = BACKEND.attend(q, k, v, route, 0.25)
    assert out[0, 0, sees].isnan().all()
    assert torch.equal(out[0, 0, ~sees], clean[0, 0, ~sees])


def tile_tokens(schedule, head, group, tile_keys):
    """The tokens of every tile of a query group, full tiles first."""
    full, cut = schedule.counts[0, head, group].tolist()
    table = schedule.key_tiles[0, head, group].tolist()
    found = []
    for number in range(full + cut):
        first, word, second, third = table[number if number < full else full - number - 1]
        numbers = [word >> SPLIT_BITS.value * i & SPLIT_MASK.value for i in range(3)]
        split, other, live = numbers if number >= full else (word, tile_keys, tile_keys)
        found.append([(first if i < split else second if i < other else third) + i for i in range(live)])
    return found, full


@pytest.mark.parametrize("sizes", ["pairs", "ragged"])
def test_key_tiles_hold_every_kept_key_once(sizes):
    labels = torch.arange(600) // 2 if sizes == "pairs" else (torch.arange(600) ** 2 // 1800)
    groups = int(labels.max()) + 1
    kv = Partition.from_labels(labels[None, None], groups)
    query = ragged(1, 2, 90, 4, loose=True)
    cells = torch.rand(1, 2, 4, groups, generator=generator(3)) < 0.6
    cells[0, 0, 1], cells[0, 0, 2] = True, torch.arange(groups) % 2 == 0  # one run; as many runs as can be
    cells[0, 1, 3] = False
    schedule = schedule_tiles(Route(query, kv, cells), 16, 8)
    starts = kv.offsets[0, 0].tolist()
    for h in range(2):
        for a in range(4):
            kept = cells[0, h, a][labels].nonzero()[:, 0].tolist()
            tiles, full = tile_tokens(schedule, h, a, 8)
            assert sorted(token for tile in tiles for token in tile) == kept
            assert all(len(tile) == 8 for tile in tiles[:full])
            assert all(0 < len(tile) <= 8 for tile in tiles[full:])
            assert (full, len(tiles) - full) == pack(_runs(cells[0, h, a].nonzero()[:, 0].tolist(), starts), 8)
            assert len(tiles) <= schedule.key_tiles.shape[3]
    assert schedule.counts[0, 0, 1].tolist() == [75, 0]  # one run of 600 keys needs no mask


def test_row_tiles_cover_every_row_once():
    query = ragged(1, 2, 200, 5, loose=True)
    kv = ragged(1, 2, 40, 3)
    schedule = schedule_tiles(Route(query, kv, torch.ones(1, 2, 5, 3, dtype=torch.bool)), 16, 8)
    for h in range(2):
        sizes = [*query.sizes[0, h].tolist(), 200 - int(query.sizes[0, h].sum())]
        tall = [n // 16 + (n % 16 > 8) for n in sizes]
        low = [int(0 < n % 16 <= 8) for n in sizes]
        assert schedule.tall_ends[0, h].tolist() == torch.tensor(tall).cumsum(0).tolist()
        assert schedule.low_ends[0, h].tolist() == torch.tensor(low).cumsum(0).tolist()
    assert schedule.tall_ends.max() <= schedule.row_tiles(200, low=False)
    assert schedule.low_ends.max() <= schedule.row_tiles(200, low=True)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_a_scale_that_is_not_positive(scale):
    q, k, v = (random(1, 1, 70, 16, seed=s) for s in range(3))
    route = random_route(ragged(1, 1, 70, 3), ragged(1, 1, 70, 5, seed=2), 0.5)
    wanted, _ = attention_truth(q, k, v, dense_mask(route), scale)
    assert_near(BACKEND.attend(q, k, v, route, scale)[0], wanted, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "keys", "dim", "masked"), [(5, 1, 64, False), (19, 530, 96, True), (35, 150, 256, False)]
)
def test_probe_rows(dtype, rows, keys, dim, masked):
    q = random(2, 2, rows, dim, dtype=dtype)
    assert dim == 64 or split_keys(4, keys, 32, FALLBACK_PROCESSORS)[0] > 1  # there is something to merge
    k, v = (random(2, keys, 1, dim, dtype=dtype, seed=s).transpose(1, 2) for s in (1, 2))
    key_mask = torch.rand(2, keys, generator=generator(4)) < 0.7 if masked else None
    mask = torch.ones(2, 1, 1, keys, dtype=torch.bool) if key_mask is None else key_mask[:, None, None]
    wanted, _ = attention_truth(q, k, v, mask.expand(2, 2, rows, keys), dim**-0.5)
    got = BACKEND.attend_rows(q, k, v, key_mask, dim**-0.5)
    assert got.dtype == torch.float32
    assert_near(got, wanted, dtype)
    assert torch.equal(got, BACKEND.attend_rows(q, k, v, key_mask, dim**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "keys", "dim", "masked"), [(5, 1, 64, False), (19, 330, 96, True), (35, 150, 256, False)]
)
def test_rows_and_what_they_keep(dtype, rows, keys, dim, masked):
    q = random(2, 2, rows, dim, dtype=dtype)
    k, v = (random(2, keys, 1, dim, dtype=dtype, seed=s).transpose(1, 2) for s in (1, 2))
    key_mask = torch.rand(2, keys, generator=generator(4)) < 0.7 if masked else None
    kv = ragged(2, 1, keys, 6, seed=3)
    if masked:
        kv = Partition.from_labels(torch.where(key_mask[:, None], kv.labels, -1), 6)
    kept = torch.rand(2, 2, rows, 6, generator=generator(5)) < 0.5
    kept[:, :, 2] = False  # a row that keeps nothing
    wanted = BASE.split_rows(*(t.double() for t in (q, k, v)), kv, kept, key_mask, dim**-0.5)
    got = BACKEND.split_rows(q, k, v, kv, kept, key_mask, dim**-0.5)
    for one, truth in zip(got, wanted, strict=True):
        assert one.dtype == torch.float32
        assert_near(one, truth, dtype)
    assert torch.equal(got[1][:, :, 2], torch.zeros_like(got[1][:, :, 2]))
    again = BACKEND.split_rows(q, k, v, kv, kept, key_mask, dim**-0.5)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_what_no_row_keeps_may_hold_anything():
    q, k, v = random(1, 1, 6, 32), random(1, 1, 60, 32, seed=1), random(1, 1, 60, 32, seed=2)
    kv = Partition.from_labels((torch.arange(60) // 20)[None, None], 3)
    kept = torch.tensor([True, False, True]).expand(1, 1, 6, 3)
    _, clean, lse = BACKEND.split_rows(q, k, v, kv, kept, None, 0.2)
    k[:, :, 25], v[:, :, 30] = torch.nan, torch.inf
    exact, part, lse_again = BACKEND.split_rows(q, k, v, kv, kept, None, 0.2)
    assert torch.equal(part, clean)
    assert torch.equal(lse, lse_again)
    assert exact.isnan().all()


def test_rows_without_keys_are_zero():
    q = random(1, 1, 3, 16)
    assert torch.equal(BACKEND.attend_rows(q, q[:, :, :0], q[:, :, :0], None, 1.0), torch.zeros(1, 1, 3, 16))
    got = BACKEND.attend_rows(q, q, q, torch.zeros(1, 3, dtype=torch.bool), 1.0)
    assert torch.equal(got, torch.zeros_like(got))


def test_64_rows_of_one_head_fill_the_gpu():
    parts, span = split_keys(programs=1, keys=75600, tile_keys=64, processors_=132)
    assert parts >= 132
    assert (parts - 1) * span < 75600 <= parts * span
    assert split_keys(programs=40 * 8, keys=75600, tile_keys=64, processors_=132)[0] == 2
    assert split_keys(programs=1, keys=1, tile_keys=64, processors_=132) == (1, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "dim", "rank"), [(70, 64, 16), (33, 96, 5), (1, 256, 16)])
def test_repair(dtype, tokens, dim, rank):
    x, left, right = (
        random(2, 2, tokens, dim),
        random(2, 2, dim, rank, seed=1) / dim**0.5,
        random(2, 2, rank, dim, seed=2) / 4,
    )
    bias = random(2, 2, dim, seed=3)
    wanted = (x.double() + x.double() @ left.double() @ right.double() + bias.double()[:, :, None]).to(dtype)
    got = BACKEND.add_affine(x.clone(), left, right, bias, dtype)
    assert got.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(BACKEND.add_affine(strided, left, right, bias, dtype), got)


def test_the_interpreter_must_be_asked_for():
    assert BACKEND.preference < 0
    assert not BACKEND.reasons(Demand(torch.device("cpu"), torch.float16, 64, 64))


@pytest.mark.parametrize("kind", ["plain", "summary", "drift"])
def test_bfloat16_against_fp64(kind):
    """The interpreter's own products of bf16 are wrong; ops/triton/interpreter.py corrects them."""
    dim, groups = 32, 3
    q = random(1, 2, 70, dim, dtype=torch.bfloat16)
    k, v = (random(1, 1, 90, dim, dtype=torch.bfloat16, seed=s) for s in (1, 2))
    route = random_route(ragged(1, 2, 70, groups, loose=True), ragged(1, 1, 90, 7), 0.4)
    keys, values = (random(1, 2, groups, 19, dim, seed=s) for s in (3, 4))
    drift = random_drift(1, 2, 1, groups, dim, 16) if kind == "drift" else None
    summary = SummaryKeys(keys, values, random(1, 2, groups, 19, seed=5), drift)
    scale = dim**-0.5
    extra = None if kind == "plain" else summary
    wanted, wanted_lse = attention_truth(q, k, v, dense_mask(route), scale, route, extra)
    out, lse = BACKEND.attend(q, k, v, route, scale, extra, torch.float32)
    torch.testing.assert_close(out.double(), wanted, atol=1.6e-2, rtol=1.6e-2)
    seen = torch.isfinite(wanted_lse)
    torch.testing.assert_close(lse[seen].double(), wanted_lse[seen], atol=1e-3, rtol=1e-3)
    # plain torch in bf16 is worse, or not much better
    rough = (out.to(torch.bfloat16).double() - wanted).abs().max()
    assert (out.double() - wanted).abs().max() <= 2 * rough
