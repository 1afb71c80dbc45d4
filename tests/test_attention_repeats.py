"""Bit-identical repeats, whatever the threads, and a global RNG that nobody touches."""

import pytest
import torch

from residua import State, attention
from residua.ops import backends
from tests.support.oracle import qkv, small

pytestmark = pytest.mark.usefixtures("every_backend")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_repeats(dtype):
    tensors = qkv(1, 2, 1, 200, dtype=dtype)
    first = attention(*tensors, small())
    assert all(torch.equal(first, attention(*tensors, small())) for _ in range(50))


@pytest.mark.slow
def test_fifty_warm_repeats():
    tensors = qkv(1, 2, 1, 200)

    def second_step():
        state = State()
        attention(*tensors, small(), state)
        return attention(*tensors, small(), state)

    first = second_step()
    assert all(torch.equal(first, second_step()) for _ in range(50))


@pytest.mark.slow
def test_one_and_two_threads(threads, every_backend):
    """Repeats are bit-identical with any number of threads. Between the two the BLAS library, in which the
    plain torch backend multiplies, may round differently, but the same pairs are evaluated; the native
    backend gives the same bits."""
    assert backends()[every_backend].deterministic
    tensors = qkv(1, 2, 1, 300, dim=32)
    outs, pairs = {1: [], 2: []}, []
    for count in (1, 2, 1, 2):
        threads(count)
        state = State()
        for _ in ("cold", "warm"):
            out, receipt = attention(*tensors, small(), state, return_receipt=True)
            outs[count].append(out)
            pairs.append(receipt.per_head.routed)
    for first, first_warm, second, second_warm in outs.values():
        assert torch.equal(first, second) and torch.equal(first_warm, second_warm)
    assert all(torch.equal(pairs[i], p) for i in (0, 1) for p in pairs[i::2])
    assert torch.allclose(outs[1][0], outs[2][0], atol=1e-5)
    if every_backend == "native":
        assert all(torch.equal(one, two) for one, two in zip(outs[1], outs[2], strict=True))


@pytest.mark.parametrize("policy", ["stratified", "random", "uniform"])
def test_the_global_rng_is_left_alone_and_has_no_say(policy):
    tensors = qkv()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = attention(*tensors, small(probe_policy=policy), State())
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, attention(*tensors, small(probe_policy=policy), State()))


def test_tied_scores_are_broken_the_same_way():
    """Tokens that repeat in pairs: every score exists twice."""
    q, k, v = (x.repeat_interleave(2, dim=2) for x in qkv(queries=120))
    first = attention(q, k, v, small())
    assert all(torch.equal(first, attention(q, k, v, small())) for _ in range(5))
