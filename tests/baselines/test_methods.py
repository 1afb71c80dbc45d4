"""Methods by name: each answers the same calls, pays for text and padding alike, and refuses what it cannot
do."""

import re
from pathlib import Path

import pytest
import torch

from residua import Config, InputError, State
from residua.baselines import METHODS, Method, find_method, method_names
from residua.method.budget import SharedBudget
from residua.tools.synthetic import VideoLike, video_like
from tests.support.oracle import masked_attention

GRID = (4, 8, 8)
TEXT = ((256, 270),)
CONFIG = Config(density=0.4, query_groups=8, kv_groups=16, probes=8, backend="torch")
ALL = method_names()


def call(kv_heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two clips of 256 video tokens and 14 text tokens, four heads."""
    made = [video_like(VideoLike((270, 1, 1), 4, 16, seed=seed)) for seed in (0, 1)]
    q, k, v = (torch.cat(same) for same in zip(*made, strict=True))
    return q, k[:, :kv_heads], v[:, :kv_heads]


def padding() -> torch.Tensor:
    """The second clip has fewer video tokens and less text."""
    valid = torch.ones(2, 270, dtype=torch.bool)
    valid[1, 200:256] = False
    valid[1, 265:] = False
    return valid


def dense(q, k, v, valid=None):
    mask = torch.ones(2, 4, 270, 270, dtype=torch.bool)
    if valid is not None:
        mask &= valid[:, None, None]
    return masked_attention(q, k, v, mask)[0]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ALL)
def test_nothing_skipped_is_dense_attention_with_text_and_padding(name, masked):
    if masked and name in ("window", "sta"):
        pytest.skip("queries and keys are not the same tokens then")
    q, k, v = call()
    method, valid = find_method(name), padding() if masked else None
    out, receipt = method.attend(
        q,
        k,
        v,
        method.settings(CONFIG.replace(density=1.0)),
        method.new_state(SharedBudget()),
        pinned_keys=TEXT,
        exact_queries=TEXT,
        key_mask=valid,
        grid=GRID,
    )
    torch.testing.assert_close(out, dense(q, k, v, valid).to(out.dtype), atol=1e-4, rtol=1e-3)
    assert receipt.pairs.total == receipt.pairs.possible and receipt.density == 1.0


@pytest.mark.parametrize("name", ALL)
def test_a_budget_pays_for_text_and_is_accounted(name):
    q, k, v = call()
    method = find_method(name)
    out, receipt = method.attend(
        q,
        k,
        v,
        method.settings(CONFIG),
        method.new_state(SharedBudget()),
        pinned_keys=TEXT,
        exact_queries=TEXT,
        grid=GRID,
        time_stages=True,
    )
    most = 0.45 if name == "authors" else 0.4  # theirs keeps the cell that crosses the budget
    assert 0.2 < receipt.density <= most and receipt.target == 0.4
    assert receipt.pairs.pinned == 8 * 256 * 14 and receipt.pairs.exact == 8 * 14 * 270
    assert receipt.cost >= receipt.density and receipt.flops > 0
    assert {"attention", "exact rows"} <= set(receipt.timings.seconds)
    truth = dense(q, k, v)
    torch.testing.assert_close(out[:, :, 256:], truth[:, :, 256:].to(out.dtype), atol=1e-4, rtol=1e-3)
    error = (out - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert 0 < float(error[:, :, :256].mean()) < 0.8
    assert (receipt.error is not None) == method.estimates_error


@pytest.mark.parametrize("name", ["anchored", "paper", "svg2", "svg-ear", "svoo"])
def test_the_second_call_starts_from_the_first(name):
    tensors, method = call(), find_method(name)
    state = method.new_state(SharedBudget())
    config = method.settings(CONFIG)
    first = method.attend(*tensors, config, state, grid=None)
    second = method.attend(*tensors, config, state, grid=None)
    assert not first[1].warm and second[1].warm
    if not isinstance(state, State):
        assert state.nbytes > 0
    state.reset()
    again = method.attend(*tensors, config, state, grid=None)
    assert not again[1].warm and torch.equal(again[0], first[0])


def test_methods_without_an_estimate_refuse_an_error_bound():
    bounded = Config(max_error=0.1)
    assert find_method("anchored").settings(bounded).max_error == 0.1
    with pytest.raises(InputError, match=r"max_error=0.1 with method 'svg2'.*anchored"):
        find_method("svg2").settings(bounded)


def test_tiles_without_a_grid_are_refused():
    method = find_method("sta")
    with pytest.raises(InputError, match="'sta' cannot compute this call: the tokens have no grid"):
        method.attend(*call(4), method.settings(CONFIG), method.new_state(SharedBudget()))


def test_names_are_known_and_new():
    with pytest.raises(InputError, match=r"method='magic' is not known; wanted one of .*hard-drop, paper.*, anchored"):
        find_method("magic")
    for name in ("dense", "oracle"):  # references
        assert METHODS[name].reference
        with pytest.raises(InputError, match=f"method='{name}' is not known"):
            find_method(name)
    with pytest.raises(ValueError, match="two of kind method"):
        METHODS.add(METHODS["anchored"])
    for name in method_names():
        method = find_method(name)
        assert isinstance(method, Method) and method.title and method.source and method.simplified


def test_the_method_on_the_page_works_in_a_whole_call():
    page = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text(encoding="utf-8")
    (source,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Blocks" in code)
    exec(compile(source, "baselines.md", "exec"), {"__name__": "baselines.md"})
    try:
        q, k, v = call()
        method = find_method("blocks")
        out, receipt = method.attend(q, k, v, CONFIG, method.new_state(SharedBudget()), pinned_keys=TEXT)
        assert out.shape == v.repeat_interleave(2, 1).shape and 0.2 < receipt.density <= 0.4
    finally:
        METHODS.remove("blocks")
