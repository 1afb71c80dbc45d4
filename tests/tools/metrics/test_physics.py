"""Physics in comparisons: clips of the model in the box are judged, others are not."""

import dataclasses
import json

import numpy as np
import pytest

from residua.tools.generate.page import comparison_page
from residua.tools.generate.run import Request
from residua.tools.metrics.physics import PhysicsRow, mean_dense_physics, mean_physics, physics_table, run_physics
from residua.world.held_out import DEMO_PROMPT
from residua.world.renderer import render_video
from residua.world.scenes import default_layout, parse_prompt


class WorldPipeline:
    """Only its name counts."""


@pytest.fixture(scope="module")
def truth() -> np.ndarray:
    scene = parse_prompt(DEMO_PROMPT)
    clip = (render_video(scene, default_layout(scene), 16, 64, 64) + 1) / 2  # [3, T, H, W]
    return clip.permute(1, 2, 3, 0).numpy()


def judged(sparse: np.ndarray, dense: np.ndarray | None, **request):
    return run_physics(WorldPipeline(), Request(DEMO_PROMPT, **request), sparse, dense)


def test_a_true_clip_is_perfect(truth):
    found = judged(truth, truth)
    assert found.from_dense.position_error == 0 and found.from_dense.kept
    assert found.from_truth.position_error < 0.15 and found.dense_from_truth == found.from_truth
    assert found.from_truth.missing_bounces == 0 < found.from_truth.bounces


def test_a_ball_that_stands_still_bends_physics_and_a_lost_one_is_told(truth):
    still = np.repeat(truth[:1], len(truth), axis=0)
    found = judged(still, truth)
    assert found.from_dense.position_error > 1 and found.from_dense.missing_bounces > 0
    assert found.dense_from_truth.missing_bounces == 0
    empty = np.full_like(truth, 0.5)
    empty[0] = truth[0]
    assert judged(empty, truth).from_dense.lost == 1


def test_nothing_is_said_where_nothing_is_known(truth):
    assert run_physics(object(), Request("a cat walks"), truth, truth) is None
    with_image = judged(truth, truth, image=object())
    assert with_image.from_truth is None and with_image.from_dense.kept
    alone = judged(truth, None)
    assert alone.from_dense is alone.dense_from_truth is None and alone.from_truth.kept


def test_rows_are_means_over_prompts(truth):
    still = np.repeat(truth[:1], len(truth), axis=0)
    good, bad = judged(truth, truth), judged(still, truth)
    row = mean_physics([good, bad])
    assert row.from_dense == pytest.approx(bad.from_dense.position_error / 2)
    assert (row.balls, row.lost) == (2, 0) and row.missed == bad.from_truth.missing_bounces
    assert row.bounces == 2 * good.from_truth.bounces
    dense = mean_dense_physics([good, bad])
    assert dense.from_dense is None and dense.missed == 0
    assert mean_physics([good, None]) is None and mean_physics([]) is None


def test_a_clip_without_a_ball_has_no_distance(truth):
    empty = np.full_like(truth, 0.5)
    found = judged(empty, truth)
    assert found.to_dict()["sparse_from_dense"]["position_error"] is None
    json.dumps(found.to_dict(), allow_nan=False)
    assert mean_physics([found]).from_dense is None


def test_the_table_is_absent_without_physics():
    assert physics_table({"dense": None, "anchored": None}) == []
    (table,) = physics_table({"dense": PhysicsRow(None, 0.25, 1, 16, 2, 30), "other": None}, "dense")
    assert table.rows == (("dense", "-", "0.250", "1 of 16", "2 of 30"),)


def test_the_comparison_and_its_page_tell_it(comparison, truth):
    assert set(comparison.to_dict()["physics"]) == {
        "sparse_from_dense",
        "sparse_from_simulator",
        "dense_from_simulator",
    }
    told = comparison_page(dataclasses.replace(comparison, physics=judged(truth, truth)), 12, "residua").decode()
    assert "Physics" in told and "0.000" in told and "simulator" in told
    other = dataclasses.replace(comparison, physics=None)
    assert "physics" not in other.to_dict()
    assert "Physics" not in comparison_page(other, 12, "residua").decode()
