"""Estimated against true error: its spread, its table, and the verdicts that follow."""

import pytest

from residua.tools.studies.estimates import Estimates, comparable
from residua.tools.studies.reconstructions import INGREDIENTS, estimate_findings, estimate_table, estimated
from tests.support.study_results import made


def test_the_spread_of_estimates_is_that_of_their_ratios():
    found = Estimates.of([(0.1, 0.1 * ratio) for ratio in (0.5, 0.7, 1.0, 1.4, 2.0)])
    assert found.median == pytest.approx(1.0) and found.within == pytest.approx(0.6) and found.calls == 5
    assert 0.5 <= found.low < 0.7 and 1.4 < found.high <= 2.0
    assert Estimates.of([]) is None


def test_only_calls_with_an_error_and_an_estimate_are_compared():
    runs = [
        made("anchored", 0.22, 0.1, estimate=0.12),
        made("anchored", 0.08, 0.2, estimate=0.1, model="other"),
        made("anchored", 0.14, 0.0),
        made("anchored", 0.14, 0.1, estimate=None),
        made("anchored", 0.14, 0.1, estimate=float("nan")),
        made("anchored", 0.22, 0.3, table=INGREDIENTS),
        made("probe", 0.22, 0.3, estimate=0.1),
    ]
    assert comparable(estimated(runs, "anchored")) == [(0.1, 0.12), (0.2, 0.1)]
    assert comparable(estimated(runs, "anchored", "other")) == [(0.2, 0.1)]
    assert comparable(estimated(runs, "anchored", densities=[0.22])) == [(0.1, 0.12)]
    rows = {row[0]: row[1:] for row in estimate_table(runs).rows}
    assert rows["anchored, all"][0] == "2" and rows["probe, 22 %"] == ("1", "0.33", "0.33", "0.33", "0 %")
    assert "anchored, 14 %" not in rows


def test_findings_about_estimates_follow_the_ratios():
    def verdicts(ours: float, paper: float) -> list[str]:
        runs = [made("anchored", 0.22, 0.1, estimate=0.1 * ours), made("probe", 0.22, 0.1, estimate=0.1 * paper)]
        return [item.verdict for item in estimate_findings(runs)]

    assert verdicts(1.05, 0.5) == ["confirmed", "confirmed", "confirmed"]
    assert verdicts(1.4, 1.0) == ["confirmed", "contradicted", "contradicted"]
    assert verdicts(2.0, 0.95) == ["contradicted", "contradicted", "contradicted"]
    assert {item.verdict for item in estimate_findings([])} == {"not measured"}
