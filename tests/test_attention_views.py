"""Strided, expanded, sliced and far-reaching views give what contiguous tensors give."""

import pytest
import torch

from residua import attention
from residua.api import attend_route
from tests.support.oracle import expand_heads, normal, qkv, random_route, small

pytestmark = pytest.mark.usefixtures("every_backend")


def channels_apart(x):
    """Last dimension with a stride of 2."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]


def tokens_first(x):
    """[B, N, H, D] in memory, as projections give it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def misaligned(x):
    storage = torch.empty(x.numel() + 1, dtype=x.dtype)
    return storage[1:].view(x.shape).copy_(x)


def backwards_batch(x):
    return x.flip(0).contiguous().flip(0)


VIEWS = [channels_apart, tokens_first, misaligned, backwards_batch]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views(view, dtype):
    q, k, v = qkv(2, 4, 2, dtype=dtype)
    seen = [view(x) for x in (q, k, v)]
    assert all(torch.equal(a, b) for a, b in zip(seen, (q, k, v), strict=True))
    spans = {"pinned_keys": (0, 5), "exact_queries": (290, 300)}
    for config in (small(), small(density=1), small(reconstruction="none")):
        wanted, out = attention(q, k, v, config, **spans), attention(*seen, config, **spans)
        assert torch.allclose(out.float(), wanted.float(), atol=1e-5 if dtype == torch.float32 else 1e-2)
    route = random_route(2, 4, 2, 300, 300)
    assert torch.allclose(
        attend_route(*seen, route, backend="torch")[0], attend_route(q, k, v, route, backend="torch")[0]
    )


def test_a_fused_projection_sliced_into_three():
    fused = normal(2, 300, 3 * 4 * 16)  # [B, N, 3 H D]
    views = [part.unflatten(-1, (4, 16)).transpose(1, 2) for part in fused.chunk(3, -1)]
    out = attention(*views, small())
    assert torch.allclose(out, attention(*(x.contiguous() for x in views), small()), atol=1e-5)


def test_expanded_keys():
    q, k, v = qkv(2, 4, 1)
    k, v = k[:1].expand(2, 4, -1, -1), v[:1].expand(2, 4, -1, -1)
    assert k.stride()[:2] == (0, 0)
    assert torch.allclose(attention(q, k, v, small()), attention(q, k.contiguous(), v.contiguous(), small()), atol=1e-5)
    assert torch.equal(expand_heads(k, 4), k)


def test_inputs_are_left_as_they_were():
    tensors = qkv(dtype=torch.float32)
    before = [x.clone() for x in tensors]
    for config in (small(), small(density=1), small(reconstruction="none")):
        attention(*tensors, config, pinned_keys=(0, 9), exact_queries=(0, 9))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_offsets_beyond_two_to_the_31():
    """A tall strided view; the storage is never touched between the rows, so it costs little memory."""
    rows, dim, stride = 80, 8, (1 << 31) // 64
    storage = torch.empty(rows * stride, dtype=torch.bfloat16)
    assert (rows - 1) * stride > 1 << 31
    q, k, v = qkv(1, 1, 1, rows, rows, dim, dtype=torch.bfloat16)
    views = []
    for place, x in enumerate((q, k, v)):
        view = storage.as_strided((1, 1, rows, dim), (rows * stride, rows * stride, stride, 1), place * dim)
        views.append(view.copy_(x))
    config = small(density=0.5, probes=4)
    assert torch.equal(attention(*views, config), attention(q, k, v, config))
