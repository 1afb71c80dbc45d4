"""The judge of user tensors: what is refused, and that the message names the way out."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import residua
from residua import Config, InputError
from residua.method.inputs import validate
from tests.support.oracle import qkv

Q, K, V = qkv(heads=4, kv_heads=2, queries=20, keys=30, dim=8, value_dim=6)


def test_a_good_call_is_named():
    call = validate(Q, K, V, pinned_keys=(25, 30), exact_queries=[(0, 2), (4, 5)])
    assert call.scale == pytest.approx(1 / math.sqrt(8)) and call.heads_per_kv == 2 and call.routable
    assert call.pinned_keys.ranges == ((25, 30),) and call.free_keys.ranges == ((0, 25),)
    assert call.exact_queries.ranges == ((0, 2), (4, 5)) and call.free_queries.ranges == ((2, 4), (5, 20))


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"q": Q.numpy()}, "q is ndarray"),
        ({"k": None}, "k is NoneType"),
        ({"q": Q[0]}, r"q has shape \[4, 20, 8\]: wanted 4 dimensions"),
        ({"q": Q.half()}, "wanted one dtype"),
        ({"v": V.to("meta")}, "wanted one device"),
        ({"q": Q.int()}, "q is torch.int32"),
        ({"q": Q.to(torch.complex64)}, "q is torch.complex64"),
        ({"k": K.to(torch.float8_e4m3fn)}, "k is torch.float8_e4m3fn"),
        ({"q": Q.to_sparse()}, "q is torch.sparse_coo"),
        ({"k": K[:, :, :29]}, r"wanted the same \[B, Hkv, Nk\]"),
        ({"v": V[:, :1]}, r"wanted the same \[B, Hkv, Nk\]"),
        ({"q": Q.expand(2, -1, -1, -1)}, "q has batch 2 and k has 1"),
        ({"q": Q[..., :7]}, "q has head_dim 7 and k has 8"),
        ({"q": Q[..., :0], "k": K[..., :0]}, "head_dim of at least 1"),
        ({"v": V[..., :0]}, "head_dim of at least 1"),
        ({"q": Q[:, :3]}, "q has 3 heads and k has 2"),
        ({"k": K[:, :0], "v": V[:, :0]}, "q has 4 heads and k has 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changed, message):
    tensors = {"q": Q, "k": K, "v": V, **changed}
    for entry in (validate, residua.attention):
        with pytest.raises(InputError, match=message):
            entry(**tensors)


class Untouched(TorchDispatchMode):
    """Nothing may be computed or allocated."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


@pytest.mark.parametrize(
    "arguments",
    [
        {"k": K.half()},
        {"v": V.to("meta")},
        {"q": Q.int()},
        {"q": Q.to(torch.complex64)},
        {"k": K[:, :, :29]},
        {"attn_mask": None},
        {"scale": math.nan},
        {"pinned_keys": (5, 2)},
        {"config": 0.5},
        {"key_mask": torch.ones(1, 30)},
    ],
)
def test_it_is_refused_before_anything_is_computed(arguments):
    with pytest.raises(InputError), Untouched():
        residua.attention(**{"q": Q, "k": K, "v": V, **arguments})


@pytest.mark.parametrize("scale", [math.nan, math.inf, "1", None.__class__, 1j])
def test_a_scale_that_is_no_number_is_refused(scale):
    with pytest.raises(InputError, match="scale="):
        validate(Q, K, V, scale=scale)


@pytest.mark.parametrize(
    "mask, message",
    [
        (torch.ones(1, 30), "wanted torch.bool"),
        (torch.ones(30, dtype=torch.bool), "wanted \\[B, Nk\\]"),
        (torch.ones(1, 29, dtype=torch.bool), "wanted \\[B, Nk\\]"),
        ([True] * 30, "key_mask is list"),
        (torch.ones(1, 30, dtype=torch.bool, device="meta"), "key_mask is on meta"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, message):
    with pytest.raises(InputError, match=message):
        validate(Q, K, V, key_mask=mask)


@pytest.mark.parametrize(
    "spans, ranges",
    [
        (None, ()),
        ([], ()),
        ((3, 3), ()),
        ((2, 5), ((2, 5),)),
        ([2, 5], ((2, 5),)),
        (slice(28, None), ((28, 30),)),
        (slice(-2, None), ((28, 30),)),
        (range(1, 4), ((1, 4),)),
        ([(8, 10), (1, 3), (2, 5), (10, 12)], ((1, 5), (8, 12))),
        (((0, 1), (2, 3)), ((0, 1), (2, 3))),
    ],
)
def test_spans_are_sorted_and_merged(spans, ranges):
    assert validate(Q, K, V, pinned_keys=spans).pinned_keys.ranges == ranges


@pytest.mark.parametrize(
    "spans",
    [(5, 2), (-1, 2), (0, 31), 7, "ab", [(0, 1.5)], [(0, 1, 2)], (True, False), range(0, 9, 2), [None], slice(0, 9, 3)],
)
def test_spans_that_make_no_sense_are_refused(spans):
    with pytest.raises(InputError, match="pinned_keys"):
        validate(Q, K, V, pinned_keys=spans)


@pytest.mark.parametrize(
    "keyword, way_out",
    [
        ("attn_mask", "key_mask="),
        ("is_causal", "dense attention"),
        ("dropout_p", "inference only"),
        ("enable_gqa", "shapes"),
        ("pined_keys", "help"),
    ],
)
def test_keywords_of_other_functions_are_refused_with_a_way_out(keyword, way_out):
    with pytest.raises(InputError, match=f"{keyword}.*{way_out}"):
        residua.attention(Q, K, V, **{keyword: None})


@pytest.mark.parametrize("arguments", [{"config": {"density": 0.5}}, {"config": 0.5}, {"state": {}}])
def test_a_config_or_state_of_another_type_is_refused(arguments):
    with pytest.raises(InputError, match=f"{next(iter(arguments))}.*wanted"):
        residua.attention(Q, K, V, **arguments)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_check_finite_refuses_and_names_the_tensor(which, value):
    tensors = {"q": Q.clone(), "k": K.clone(), "v": V.clone()}
    tensors[which][0, 0, 3, 2] = value
    with pytest.raises(InputError, match=f"{which} holds NaN or Inf"):
        residua.attention(**tensors, config=Config(check_finite=True))
    validate(**tensors)  # without the setting it is passed on


def test_gradients_are_refused_in_grad_mode_only():
    wanting = Q.clone().requires_grad_()
    with pytest.raises(InputError, match=r"torch\.no_grad"):
        residua.attention(wanting, K, V)
    with torch.no_grad():
        out = residua.attention(wanting, K, V)
    assert not out.requires_grad
    assert torch.equal(out, residua.attention(Q, K, V))
