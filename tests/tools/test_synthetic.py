"""Video-like calls: repeatable, tunable, as concentrated as real heads; and what the method does on them."""

import pytest
import torch

import residua
from residua.tools.metrics.row_error import row_errors
from residua.tools.synthetic import CONCENTRATIONS, VideoLike, grid_for, key_fraction, video_like
from tests.support.oracle import masked_attention

SMALL = (6, 12, 16)  # 1152 tokens


def call(concentration, seed=0, **more):
    return video_like(VideoLike(SMALL, 2, 32, concentration, seed=seed, **more))


def test_the_same_recipe_gives_the_same_call_and_leaves_the_global_rng_alone():
    before = torch.get_rng_state()
    first, second = call(16.5), call(16.5)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], call(16.5, seed=1)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_types(dtype):
    tensors = video_like(VideoLike((2, 3, 5), 3, 10), dtype)
    assert all(t.shape == (1, 3, 30, 10) and t.dtype == dtype and t.isfinite().all() for t in tensors)


@pytest.mark.parametrize("tokens", [1, 64, 1000, 4097, 8192])
def test_grids_hold_the_tokens_asked_for(tokens):
    frames, height, width = grid_for(tokens)
    assert frames * height * width == tokens


def test_concentration_orders_the_heads_from_broad_to_sparse():
    fractions = [float(key_fraction(*call(c)[:2]).mean()) for c in CONCENTRATIONS.values()]
    assert list(CONCENTRATIONS) == ["broad", "medium", "sparse"]
    assert fractions[0] > 0.5 > 0.3 > fractions[1] > 2 * fractions[2] > 0


def test_key_fraction_against_a_loop():
    q, k, _ = call(16.5)
    found = key_fraction(q, k, mass=0.9, rows=8)
    for h in range(2):
        needed = []
        for i in [j * 1152 // 8 for j in range(8)]:
            weights = (q[0, h, i].double() @ k[0, h].double().T / 32**0.5).softmax(-1).tolist()
            total, count = 0.0, 0
            for weight in sorted(weights, reverse=True):
                total, count = total + weight, count + 1
                if total >= 0.9:
                    break
            needed.append(count / 1152)
        assert float(found[0, h]) == pytest.approx(sorted(needed)[3], abs=2 / 1152)  # lower median


def test_positions_alone_make_near_tokens_attend_to_each_other():
    """With locality 1 a logit depends on the positions' difference only, and is greatest for none."""
    q, k, _ = video_like(VideoLike((3, 4, 5), 1, 24, locality=1.0))
    logits = (q[0, 0].double() @ k[0, 0].double().T).view(3, 4, 5, 3, 4, 5)
    assert torch.allclose(logits[0, 1, 2, 1, 2, 3], logits[1, 2, 3, 2, 3, 4], rtol=1e-4)
    assert (logits.view(60, 60).argmax(-1) == torch.arange(60)).all()


def test_steps_drift():
    q = [call(16.5, step=s)[0] for s in (0.0, 0.05, 0.5)]
    near, far = (q[1] - q[0]).norm(), (q[2] - q[0]).norm()
    assert 0 < near < 0.2 * far


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("partition", ["response", "semantic"])
def test_reconstruction_lowers_the_error_of_broad_heads(seed, partition):
    q, k, v = call(CONCENTRATIONS["broad"], seed)
    dense, _ = masked_attention(q, k, v)
    config = residua.Config(backend="torch", partition=partition, key_rank=32, query_rank=32)
    reconstructed, receipt = residua.attention(q, k, v, config, return_receipt=True)
    # the same pairs spent on cells alone
    dropped = residua.attention(q, k, v, config.replace(reconstruction="none"))
    assert receipt.density <= 0.22
    assert row_errors(reconstructed, dense)[0] < 0.9 * row_errors(dropped, dense)[0]


@pytest.mark.parametrize("concentration", [0.0, 3.0, *CONCENTRATIONS.values(), 80.0, 1000.0])
@pytest.mark.parametrize("density", [0.02, 0.22, 0.9])
def test_extreme_heads_stay_bounded_in_every_precision(concentration, density):
    """Uniform attention, one key per row, hardly any pairs: nothing runs away from hard drop."""
    q, k, v = call(concentration)
    dense, _ = masked_attention(q, k, v)
    config = residua.Config(density=density, backend="torch")
    dropped = row_errors(residua.attention(q, k, v, config.replace(reconstruction="none")), dense)[0]
    full = row_errors(residua.attention(q, k, v, config), dense)[0]
    half = row_errors(residua.attention(q.half(), k.half(), v.half(), config), dense)[0]
    assert full <= 2.5 * dropped + 0.1
    assert abs(half - full) <= 0.1 * full + 0.05
