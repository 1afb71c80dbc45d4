"""The tables of a suite's report: means with intervals, medians, speed, paired differences."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..generate.flops import flops_unit
from ..reports.table import Table
from .statistics import Estimate, PromptValues, estimate, paired, prompt_values, speedups
from .suite import NOISE_FLOOR, Suite

Forms = dict[str, tuple[str, str]]
Estimates = dict[str, dict[str, Estimate | None]]  # setting -> metric -> estimate
SPEEDUP = "speedup"
TITLE = "Quality and efficiency (the paper's Table 1)"
NOTE = (
    "mean [95 % interval from a bootstrap over prompts]. Distances are from the dense clip of the same prompt and "
    f"seed; the row {NOISE_FLOOR!r} is the noise floor: dense against dense, its attention summed in another order. "
    "Cost is that of the sparse calls as a share of dense attention."
)
# Column of a row -> its title, and how a mean is printed.
METRICS: Forms = {
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
    """The paper's Table 1 with intervals, medians, speed, and the difference of every two sparse settings."""
    forms = {**METRICS, **{name: (name, "{:.4f}") for name in scores}}
    found = {
        name: {metric: estimate(by_prompt) for metric, by_prompt in metrics.items()} for name, metrics in values.items()
    }
    first = _columns(found, forms, _cell)
    unit, factor = flops_unit(one.mean for metrics in found.values() if (one := metrics["pflops"]) is not None)
    first[unit] = [_scaled(metrics["pflops"], factor) for metrics in found.values()]
    first["balls kept (clips)"] = [_kept([row for row in done if row["setting"] == name]) for name in found]
    medians, names = _columns(found, forms, _median), list(found)
    made = [
        Table.filled(TITLE, "setting", names, first, NOTE),
        Table.filled("Medians", "setting", names, medians, "Over prompts, seeds averaged first."),
        _speed_table(values, found),
    ]
    differences = _difference_table(suite, values, {name: forms[name] for name in (*COMPARED, *scores)})
    return made if differences is None else [*made, differences]


def _columns(found: Estimates, forms: Forms, show: Callable[[Estimate | None, str], str]) -> dict[str, list[str]]:
    return {
        title: [show(metrics[metric], form) for metrics in found.values()] for metric, (title, form) in forms.items()
    }


def _speed_table(values: Values, estimates: Estimates) -> Table:
    rows = []
    for name, metrics in values.items():
        seconds, speedup = estimates[name]["seconds"], estimates[name][SPEEDUP]
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


def _difference_table(suite: Suite, values: Values, forms: Forms) -> Table | None:
    """The difference of every two sparse settings, prompt by prompt."""
    names = [setting.name for setting in suite.settings if setting.asked is not None]
    pairs = list(itertools.combinations(names, 2))
    cells = {
        title: [_difference(paired(values[a][metric], values[b][metric]), form) for a, b in pairs]
        for metric, (title, form) in forms.items()
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
