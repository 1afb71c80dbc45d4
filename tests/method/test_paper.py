"""`Config.paper()` against SparsePR written down a second time (`method/naive_paper.py`)."""

import pytest

from dev.benchmarks.paper_agreement import agreement
from residua import Config
from residua.method.inputs import validate
from residua.ops.select import backends
from residua.tools.synthetic import VideoLike, video_like


@pytest.mark.parametrize("backend", ["torch", "native", "reference"])
@pytest.mark.parametrize(
    "grid, head_dim, settings",
    [
        ((4, 16, 16), 32, {}),
        ((3, 15, 17), 40, {"density": 0.35, "probes": 24, "residual_rank": 5}),
        ((4, 16, 16), 64, {"query_groups": 80, "kv_groups": 100, "probes": 32}),  # more groups than probes
    ],
)
def test_paper_mode_is_the_paper(backend, grid, head_dim, settings):
    if reason := backends()[backend].unavailable():
        pytest.skip(reason)
    q, k, v = video_like(VideoLike(grid=grid, heads=1, head_dim=head_dim))
    found = agreement(validate(q, k, v), Config.paper(backend=backend, **settings))
    assert found.same_cells and found.same_probes
    assert found.weights < 1e-6
    assert found.moved <= 4  # rows between two centres
    assert found.worst < 1e-4


def test_another_method_does_not_agree():
    q, k, v = video_like(VideoLike(grid=(4, 16, 16), heads=1, head_dim=32))
    found = agreement(validate(q, k, v), Config.paper(backend="torch", ridge=0.2).replace(score="centroid"))
    assert not found.same_cells
    assert found.worst > 1e-3
