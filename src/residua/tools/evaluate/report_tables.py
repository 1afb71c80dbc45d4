"""The tables of a suite's report: means with intervals, medians, speed, paired differences."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..generate.flops import flops_unit
from ..reports.table import Table
from .statistics import Estimate, PromptValues, estimate, paired, prompt_values, speedups
from .suite import FLOOR, Suite

SPEEDUP = "speedup"
# Column of a row -> its title, and how a mean is printed.
METRICS: dict[str, tuple[str, str]] = {
    "psnr": ("PSNR dB", "{:.2f}"),
    "ssim": ("SSIM", "{:.4f}"),
    "gmsd": ("GMSD", "{:.4f}"),
    "lpips": ("LPIPS", "{:.4f}"),
    "physics_error": ("radii off the simulator", "{:.3f}"),
    "physics_dense_error": ("radii off the dense video", "{:.3f}"),
    "error": ("estimated error", "{:.4f}"),
    "density": ("density", "{:.3f}"),
    "cost": ("cost", "{:.3f}"),
    SPEEDUP: ("speed-up", "{:.2f}x"),
}
COMPARED = ("psnr", "ssim", "gmsd", "lpips", "physics_error", "error", "cost", SPEEDUP)
Values = dict[str, dict[str, PromptValues]]  # setting -> metric -> prompt -> value


def collect(suite: Suite, done: Sequence[Mapping[str, Any]], scores: Sequence[str] = ()) -> Values:
    """Every metric of every setting, prompt by prompt."""
    dense = [row for row in done if row["id"] == row["reference"]]
    found: Values = {}
    for setting in suite.settings:
        rows = [row for row in done if row["setting"] == setting.name]
        metrics = {
            name: prompt_values(rows, name) for name in (*METRICS, "seconds", "pflops", *scores) if name != SPEEDUP
        }
        metrics[SPEEDUP] = speedups(rows, dense)
        found[setting.name] = metrics
    # What dense attention would have cost is known from the sparse rows of the same prompts.
    sparse = [row for row in done if row.get("dense_pflops") is not None]
    found[suite.settings[0].name]["pflops"] = prompt_values(sparse, "dense_pflops")
    return found


def tables(suite: Suite, values: Values, scores: Sequence[str], done: Sequence[Mapping[str, Any]]) -> list[Table]:
    made = [_first_table(values, scores, done), _median_table(values, scores), _speed_table(values)]
    differences = _difference_table(suite, values, scores)
    return made if differences is None else [*made, differences]


def _first_table(values: Values, scores: Sequence[str], done: Sequence[Mapping[str, Any]]) -> Table:
    """The paper's Table 1: mean, interval and median wherever there is a value."""
    unit, factor = flops_unit(
        found.mean for metrics in values.values() if (found := estimate(metrics["pflops"])) is not None
    )
    forms = {**METRICS, **{name: (name, "{:.4f}") for name in scores}}
    cells = {
        title: [_cell(estimate(metrics[metric]), form) for metrics in values.values()]
        for metric, (title, form) in forms.items()
    }
    cells[unit] = [_scaled(estimate(metrics["pflops"]), factor) for metrics in values.values()]
    cells["balls kept (clips)"] = [_kept([row for row in done if row["setting"] == name]) for name in values]
    return Table.filled(
        "Quality and efficiency (the paper's Table 1)",
        "setting",
        list(values),
        cells,
        note="mean [95 % interval from a bootstrap over prompts]. Distances are from the "
        f"dense clip of the same prompt and seed; the row {FLOOR!r} is the floor: dense against dense, its "
        "attention summed in another order. Cost is that of the sparse calls as a share of dense attention.",
    )


def _median_table(values: Values, scores: Sequence[str]) -> Table:
    forms = {**METRICS, **{name: (name, "{:.4f}") for name in scores}}
    cells = {
        title: [_median(estimate(metrics[metric]), form) for metrics in values.values()]
        for metric, (title, form) in forms.items()
    }
    return Table.filled("Medians", "setting", list(values), cells, note="Over prompts, seeds averaged first.")


def _speed_table(values: Values) -> Table:
    rows = []
    for name, metrics in values.items():
        seconds, speedup = estimate(metrics["seconds"]), estimate(metrics[SPEEDUP])
        spread = "-"
        if speedup is not None:
            low, high = speedup.quartiles
            found = metrics[SPEEDUP].values()
            spread = f"{low:.2f} to {high:.2f} ({min(found):.2f} to {max(found):.2f})"
        rows.append((name, _cell(seconds, "{:.2f}"), _cell(speedup, "{:.2f}x"), spread))
    return Table(
        "Speed",
        ("setting", "seconds", "speed-up", "middle half (all)"),
        tuple(rows),
        note="Of the whole generation, against the dense clip of the same prompt and seed, on one hardware.",
    )


def _difference_table(suite: Suite, values: Values, scores: Sequence[str]) -> Table | None:
    """The difference of every two sparse settings, prompt by prompt."""
    names = [setting.name for setting in suite.settings if setting.asked is not None]
    pairs = list(itertools.combinations(names, 2))
    forms = {**METRICS, **{name: (name, "{:.4f}") for name in scores}}
    cells = {
        forms[metric][0]: [
            _difference(paired(values[a][metric], values[b][metric]), forms[metric][1]) for a, b in pairs
        ]
        for metric in (*COMPARED, *scores)
    }
    note = "Mean difference on the same prompts [95 % interval]; * where the interval leaves out zero."
    table = Table.filled("Paired differences", "settings", [f"{a} - {b}" for a, b in pairs], cells, note)
    return table if pairs and len(table.columns) > 1 else None


def _cell(found: Estimate | None, form: str) -> str:
    if found is None:
        return "-"
    interval = ""
    if found.low is not None and found.high is not None:
        low, high = form.format(found.low), form.format(found.high)
        interval = f" [{low}, {high}]" if low != high else ""  # equal at this precision: it says nothing more
    return f"{form.format(found.mean)}{interval}"


def _median(found: Estimate | None, form: str) -> str:
    return "-" if found is None else form.format(found.median)


def _scaled(found: Estimate | None, factor: float) -> str:
    return "-" if found is None else f"{found.mean * factor:.2f}"


def _difference(found: Estimate | None, form: str) -> str:
    if found is None:
        return "-"
    signed = form.replace("{:", "{:+")
    interval = ""
    if found.low is not None and found.high is not None:
        low, high = _signed(found.low, signed), _signed(found.high, signed)
        interval = f" [{low}, {high}]" if low != high else ""
    return f"{_signed(found.mean, signed)}{interval}{' *' if found.excludes_zero else ''}"


def _signed(value: float, form: str) -> str:
    """Zero at this precision has no sign."""
    text = form.format(value)
    return text if any(digit in text for digit in "123456789") else text[1:]


def _kept(rows: Sequence[Mapping[str, Any]]) -> str:
    known = [row["physics_kept"] for row in rows if row["physics_kept"] is not None]
    return f"{sum(known)} of {len(known)}" if known else "-"
