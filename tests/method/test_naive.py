"""The default method beside `method/naive.py`, which shares no code with it."""

import pytest
import torch

import residua
from residua.method import naive
from residua.method.reconstructions import RECONSTRUCTIONS
from residua.ops.select import backends
from residua.tools.synthetic import CONCENTRATIONS, VideoLike, video_like
from tests.support.making import grouped_call

GRID, DENSITY = (4, 16, 16), 0.3


def both(config: residua.Config, stretch: float = 1.0, **recipe):
    """Output, cells, choice and error: of the package, and of the naive version on the same sizes."""
    if reason := backends()[config.backend].unavailable():
        pytest.skip(reason)
    q, k, v = video_like(VideoLike(grid=GRID, heads=1, **recipe))
    q = q * stretch
    grouped = grouped_call(q, k, v, config, backend=backends()[config.backend])
    sizes, grouping = grouped.sizes, grouped.grouping
    assert RECONSTRUCTIONS["anchored"].affordable(grouped)[0].name == "anchored"  # the budget pays for anchors
    cells = RECONSTRUCTIONS["anchored"].route(grouped).route.cells[0, 0]
    out, receipt = residua.attention(q, k, v, config, return_receipt=True)
    [choice] = [name for name, heads in receipt.chosen.items() if heads]

    names = (name for name in naive.HeadSizes._fields if name not in ("density", "kmeans_steps"))
    same = naive.HeadSizes(
        density=config.density, kmeans_steps=config.kmeans_cold, **{x: getattr(sizes, x) for x in names}
    )
    x, y, z = (t[0, 0].double() for t in (q, k, v))
    groups = naive.group_tokens(x, y, same)
    labels = grouping.query.labels[0, 0], grouping.kv.labels[0, 0]
    moved = sum(int((one.labels != other).sum()) for one, other in zip(groups, labels, strict=True))
    assert moved <= 4  # rows between two centres
    groups = naive.TokenGroups.of(x, labels[0], same.query_groups), naive.TokenGroups.of(y, labels[1], same.kv_groups)
    return (out[0, 0], cells, choice, receipt.error), naive.anchored(x, y, z, same, groups)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("concentration", CONCENTRATIONS)
@pytest.mark.parametrize("settings", [{"summary_slots": 8}, {"summary_slots": 12, "density": 0.4}])
def test_the_default_method_is_the_naive_one(backend, concentration, settings):
    config = residua.Config(backend=backend, **{"density": DENSITY, **settings})
    ours, wanted = both(config, concentration=CONCENTRATIONS[concentration], head_dim=40)
    assert torch.equal(ours[1], wanted[1])
    assert ours[2] == wanted[2] == "with drift"
    assert ours[3] == pytest.approx(wanted[3], rel=1e-4)
    assert ((ours[0] - wanted[0]).norm(dim=1) <= 1e-4 * wanted[0].norm(dim=1)).all()


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_concentrated_heads_drop_the_summary_in_both(backend):
    config = residua.Config(backend=backend, density=DENSITY, summary_slots=8)
    ours, wanted = both(config, stretch=4.0, head_dim=32)
    assert torch.equal(ours[1], wanted[1])
    assert ours[2] == wanted[2] == "without summary"
    assert ((ours[0] - wanted[0]).norm(dim=1) <= 1e-4 * wanted[0].norm(dim=1)).all()
