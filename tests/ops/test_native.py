"""Attention of the native backend, on every instruction set of this machine, against the fp64 reference."""

import math

import pytest
import torch
from torch import Tensor

from residua.ops.native import NativeBackend
from residua.ops.reference import Reference
from residua.types import Partition, Route, SummaryKeys
from tests.support.native_library import needs_library, on_every_isa

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE = 0.2


def rows(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def partition(generator: torch.Generator, heads: int, tokens: int, groups: int, loose: float = 0.0) -> Partition:
    """Ragged groups, some likely empty; a share `loose` of the tokens belongs to none."""
    skew = torch.rand(1, heads, tokens, generator=generator).square()
    labels = (skew * groups).long().clamp(max=groups - 1)
    labels[torch.rand(1, heads, tokens, generator=generator) < loose] = -1
    return Partition.from_labels(labels, groups)


def make(
    nq: int,
    nk: int,
    dim: int,
    *,
    value_dim: int | None = None,
    heads: int = 2,
    kv_heads: int = 2,
    cq: int = 5,
    ck: int = 9,
    keep: float = 0.5,
    loose: float = 0.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Route]:
    g = torch.Generator().manual_seed(seed)
    q, k = rows(g, 1, heads, nq, dim, dtype=dtype), rows(g, 1, kv_heads, nk, dim, dtype=dtype)
    v = rows(g, 1, kv_heads, nk, value_dim or dim, dtype=dtype)
    cells = torch.rand(1, heads, cq, ck, generator=g) < keep
    return q, k, v, Route(partition(g, heads, nq, cq, loose), partition(g, kv_heads, nk, ck, loose), cells)


def wanted_of(q: Tensor, k: Tensor, v: Tensor, route: Route, extra: SummaryKeys | None = None, scale: float = SCALE):
    return Reference().attend(q.double(), k.double(), v.double(), route, scale, extra)


def plain(q: Tensor, k: Tensor, v: Tensor, route: Route) -> Tensor:
    """Masked attention of torch in the same dtype: the error that is allowed twice."""
    shares = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shares, 1), v.repeat_interleave(shares, 1)
    kv_labels = route.kv.labels.repeat_interleave(shares, 1)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for h in range(q.shape[1]):
        mask = route.cells[0, h][route.query.labels[0, h].clamp(min=0)][:, kv_labels[0, h].clamp(min=0)]
        mask &= (route.query.labels[0, h] >= 0)[:, None] & (kv_labels[0, h] >= 0)
        logits = (q[0, h] @ k[0, h].mT * SCALE).masked_fill(~mask, -torch.inf)
        out[0, h] = torch.where(mask.any(-1, keepdim=True), logits.softmax(-1), 0.0) @ v[0, h]
    return out


def assert_close(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, route: Route) -> None:
    wanted, wanted_lse = wanted_of(q, k, v, route)
    error, allowed = (out.double() - wanted).norm(), (plain(q, k, v, route).double() - wanted).norm()
    assert error <= 2 * allowed + 1e-6 * wanted.norm(), f"error {error:.3g}, plain torch has {allowed:.3g}"
    assert torch.equal(lse.isinf(), wanted_lse.isinf())
    finite = wanted_lse.isfinite()
    torch.testing.assert_close(lse[finite], wanted_lse[finite], rtol=1e-5, atol=2e-5)


@needs_library
@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 40, 64, 80, 96, 128, 256])
def test_error_is_at_most_twice_that_of_plain_torch(isa, dtype, dim):
    q, k, v, route = make(230, 310, dim, kv_heads=1, dtype=dtype)
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_close(out, lse, q, k, v, route)


@needs_library
@on_every_isa
@pytest.mark.parametrize("nq,nk", [(1, 1), (2, 63), (63, 2), (97, 97), (1, 1025), (1025, 1), (1025, 509)])
def test_odd_sizes(isa, nq, nk):
    q, k, v, route = make(nq, nk, 24, cq=7, ck=11)
    assert_close(*NativeBackend(isa).attend(q, k, v, route, SCALE), q, k, v, route)


@needs_library
@on_every_isa
@pytest.mark.parametrize("dim,value_dim", [(8, 256), (256, 8), (64, 96), (33, 47)])
def test_value_dim_may_differ(isa, dim, value_dim):
    q, k, v, route = make(150, 170, dim, value_dim=value_dim)
    assert_close(*NativeBackend(isa).attend(q, k, v, route, SCALE), q, k, v, route)


@needs_library
@on_every_isa
def test_grouped_heads_loose_tokens_and_low_precision_inputs_to_fp32(isa):
    q, k, v, route = make(301, 203, 64, heads=6, kv_heads=2, loose=0.2, dtype=torch.bfloat16)
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE, out_dtype=torch.float32)
    wanted, _ = wanted_of(q, k, v, route)
    assert out.dtype == torch.float32
    assert (out - wanted).norm() <= 2e-6 * wanted.norm() or isa == "avx512bf16"
    assert (out - wanted).norm() <= 4e-3 * wanted.norm()
    loose = route.query.labels < 0
    assert loose.any() and bool((out[loose] == 0).all()) and bool((lse[loose] == -torch.inf).all())


@needs_library
@on_every_isa
def test_batches(isa):
    parts = [make(90, 110, 24, heads=4, value_dim=32, seed=seed) for seed in range(3)]
    q, k, v = (torch.cat([part[i] for part in parts]) for i in range(3))
    routes = [part[3] for part in parts]
    query, kv = (
        Partition.from_labels(torch.cat([getattr(r, name).labels for r in routes]), groups)
        for name, groups in (("query", 5), ("kv", 9))
    )
    together = NativeBackend(isa).attend(q, k, v, Route(query, kv, torch.cat([r.cells for r in routes])), SCALE)
    alone = [NativeBackend(isa).attend(*part, SCALE) for part in parts]
    for i in range(2):
        assert torch.equal(together[i], torch.cat([result[i] for result in alone]))


@needs_library
@on_every_isa
def test_one_huge_group_is_cut_into_tasks(isa):
    q, k, v, route = make(3000, 700, 64, heads=1, kv_heads=1)
    labels = torch.zeros(1, 1, 3000, dtype=torch.long)
    labels[..., -30:] = 3
    route = Route(Partition.from_labels(labels, 5), route.kv, route.cells)
    assert_close(*NativeBackend(isa).attend(q, k, v, route, SCALE), q, k, v, route)


@needs_library
@on_every_isa
def test_nothing_kept_gives_zero_and_minus_infinity(isa):
    q, k, v, route = make(80, 90, 32)
    route.cells[:, :, 1] = False
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE)
    empty = route.query.labels == 1
    assert empty.any() and bool((out[empty] == 0).all()) and bool((lse[empty] == -torch.inf).all())


@needs_library
@on_every_isa
def test_keeping_one_group_differs_from_dense_and_equals_the_judge(isa):
    q, k, v, route = make(120, 140, 64)
    route.cells[:] = False
    route.cells[..., 0] = True
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE)
    assert_close(out, lse, q, k, v, route)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=SCALE)
    assert (out - dense).abs().max() > 0.1


@needs_library
@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extra_keys", [1, 40, 64, 100])
def test_extra_keys(isa, extra_keys, dtype):
    q, k, v, route = make(140, 160, 48, value_dim=40, dtype=dtype)
    g = torch.Generator().manual_seed(5)
    weight = 3 * rows(g, 1, 2, 5, extra_keys)
    weight[torch.rand(weight.shape, generator=g) < 0.3] = -torch.inf
    keys, values = rows(g, 1, 2, 5, extra_keys, 48), rows(g, 1, 2, 5, extra_keys, 40)
    keys[weight == -torch.inf] = torch.nan  # a key that is off does not matter, whatever it holds
    route.cells[:, :, 2] = False
    extra = SummaryKeys(keys, values, weight)
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE, extra)
    wanted, wanted_lse = wanted_of(q, k, v, route, SummaryKeys(keys.nan_to_num(), values, weight))
    assert (out.double() - wanted).norm() <= max(1e-6, torch.finfo(dtype).eps / 2) * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@needs_library
@on_every_isa
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(isa, scale):
    q, k, v, route = make(70, 90, 32, keep=0.8)
    out, lse = NativeBackend(isa).attend(q, k, v, route, scale)
    wanted, wanted_lse = wanted_of(q, k, v, route, scale=scale)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@needs_library
@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_values_of_skipped_groups_touch_nothing(isa, dtype):
    q, k, v, route = make(150, 200, 64, heads=1, kv_heads=1, dtype=dtype)
    route.cells[..., 4] = False
    backend = NativeBackend(isa)
    clean = backend.attend(q, k, v, route, SCALE)
    skipped = route.kv.labels[0, 0] == 4
    assert skipped.any()
    k[0, 0, skipped], v[0, 0, skipped] = torch.nan, torch.inf
    for now, before in zip(backend.attend(q, k, v, route, SCALE), clean, strict=True):
        assert torch.equal(now, before)


@needs_library
@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_non_finite_values_spread_as_in_dense_attention(isa, dtype, bad, where):
    q, k, v, route = make(140, 150, 64, heads=1, kv_heads=1, cq=1, ck=1, keep=1.1, dtype=dtype)
    {"q": q, "k": k, "v": v}[where][0, 0, 77, 13] = bad
    out, _ = NativeBackend(isa).attend(q, k, v, route, SCALE)
    dense = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=SCALE)
    assert torch.equal(out.isnan(), dense.isnan())
    assert torch.equal(out.isinf(), dense.isinf())


@needs_library
@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_logits_stay_finite(isa, dtype):
    q, k, v, route = make(90, 130, 64, keep=0.9, dtype=dtype)
    loud = 1e4 / (8 * SCALE)
    q = (q * math.sqrt(loud)).to(dtype)
    k = (k * math.sqrt(loud)).to(dtype)
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE)
    wanted, wanted_lse = wanted_of(q, k, v, route)
    assert out.isfinite().all()
    assert (out.double() - wanted).norm() <= 0.02 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@needs_library
@on_every_isa
def test_equal_logits_give_the_mean(isa):
    q, k, v, route = make(60, 200, 64, heads=1, kv_heads=1, cq=1, ck=1, keep=1.1)
    out, lse = NativeBackend(isa).attend(torch.zeros_like(q), k, v, route, SCALE)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(200)))


@needs_library
@on_every_isa
def test_products_of_bfloat16_flush_what_is_not_normal(isa):
    """The one instruction set whose products are not IEEE's: what is below the smallest normal number is 0 in
    it, as an operand and as a sum, although torch and the processor keep such numbers (no flush-to-zero is
    set). The fuzzer's tolerance for these numbers rests on this."""
    tiny = torch.finfo(torch.bfloat16).tiny
    q, k, v, route = make(3, 2, 16, heads=1, kv_heads=1, cq=1, ck=1, keep=1.1, dtype=torch.bfloat16)
    assert float(torch.tensor(tiny) * 0.5) == tiny / 2

    def mean_of(one: float, other: float) -> float:
        v[0, 0, 0], v[0, 0, 1] = one, other
        out, _ = NativeBackend(isa).attend(torch.zeros_like(q), k, v, route, SCALE)
        assert bool((out == out[0, 0, 0, 0]).all())
        return float(out[0, 0, 0, 0]) / tiny

    flushed = isa == "avx512bf16"
    assert mean_of(8.0 * tiny, 4.0 * tiny) == 6.0
    assert mean_of(1.0 * tiny, 1.0 * tiny) == 1.0  # normal operands
    assert mean_of(0.5 * tiny, 0.5 * tiny) == (0.0 if flushed else 0.5)  # operands that are not
    assert mean_of(2.0 * tiny, -1.5 * tiny) == (0.0 if flushed else 0.25)  # a sum that is not


@needs_library
@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_view_equals_its_contiguous_copy(isa, dtype):
    g = torch.Generator().manual_seed(3)
    _, _, _, route = make(101, 101, 40)
    fused = rows(g, 1, 101, 3, 2, 40, dtype=dtype)  # B, N, qkv, H, D
    sliced = [x.transpose(1, 2) for x in fused.unbind(2)]
    flipped = [rows(g, 1, 2, 40, 101, dtype=dtype).mT for _ in range(3)]
    expanded = [rows(g, 1, 1, 101, 40, dtype=dtype).expand(1, 2, 101, 40) for _ in range(3)]
    misaligned = [rows(g, 1 + 2 * 101 * 40, dtype=dtype)[1:].view(1, 2, 101, 40) for _ in range(3)]
    backend = NativeBackend(isa)
    for views in (sliced, flipped, expanded, misaligned):
        got = backend.attend(*views, route, SCALE)
        wanted = backend.attend(*(x.contiguous() for x in views), route, SCALE)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@needs_library
def test_offsets_past_32_bits():
    """A tall view of one row: the last tokens lie more than 2^31 elements behind the first."""
    tokens, stride = 40, 1 << 26
    g = torch.Generator().manual_seed(4)
    try:
        base = torch.empty(tokens * stride, dtype=torch.bfloat16)  # touched only where the rows lie
    except RuntimeError as error:
        pytest.skip(f"no address space for the test: {error}")
    k = base.as_strided((1, 1, tokens, 16), (tokens * stride, tokens * stride, stride, 1))
    k.copy_(rows(g, 1, 1, tokens, 16))
    q, v, _, route = make(30, tokens, 16, heads=1, kv_heads=1, dtype=torch.bfloat16)
    v = rows(g, 1, 1, tokens, 16, dtype=torch.bfloat16)
    got, _ = NativeBackend().attend(q, k, v, route, SCALE)
    wanted, _ = NativeBackend().attend(q, k.contiguous(), v, route, SCALE)
    assert torch.equal(got, wanted)


@needs_library
@on_every_isa
def test_repeats_and_thread_counts_are_bit_identical(isa, threads):
    q, k, v, route = make(900, 800, 64, dtype=torch.bfloat16)
    backend = NativeBackend(isa)
    results = []
    for count in (1, 2, 3, 2, 1):
        threads(count)
        results.append(backend.attend(q, k, v, route, SCALE))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@needs_library
@on_every_isa
def test_logits_of_minus_infinity_weigh_nothing(isa):
    """Keys in the first tile that no row can see must not spoil the keys after them."""
    q, k, v, route = make(50, 300, 16, heads=1, kv_heads=1, cq=1, ck=1, keep=1.1)
    q, k = q.abs(), k.clone()
    k[0, 0, :130] = -torch.inf
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE)
    tail = Route(
        route.query, Partition.from_labels(torch.where(torch.arange(300) < 130, -1, 0)[None, None], 1), route.cells
    )
    wanted, wanted_lse = wanted_of(q, k.nan_to_num(neginf=0), v, tail)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    k[:] = -torch.inf
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE)
    assert bool(out.isnan().all()) and bool((lse == -torch.inf).all())  # a dense softmax gives NaN, too


@needs_library
def test_empty_calls():
    backend = NativeBackend()
    for nq, nk in ((0, 10), (10, 0)):
        q, k, v, route = make(nq, nk, 16)
        out, lse = backend.attend(q, k, v, route, SCALE)
        assert out.shape == (1, 2, nq, 16) and bool((out == 0).all()) and bool((lse == -torch.inf).all())
