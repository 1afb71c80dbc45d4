"""What a suite found, as files: report.html, report.md, report.json, and all rows as rows.parquet."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from ..generation.flops import flops_unit
from ..generation.method_table import MAX_WAITING
from ..lab.figures import curves
from ..lab.report import Picture, Report, render_page, style
from ..lab.tables import Table
from .scorers import RowScores
from .statistics import (
    ENOUGH_PROMPTS,
    Estimate,
    PromptValues,
    estimate,
    paired,
    prompt_key,
    prompt_values,
    speedups,
)
from .store import DONE, FAILED, rows_table
from .suite import FLOOR, Suite

PACKAGE = "residua.evaluate"
WORST = 10
SPEEDUP = "speedup"
MAX_PARTS = 200  # points of a line of the figure
# Column of a row -> its title, and how a mean is printed.
METRICS: dict[str, tuple[str, str]] = {
    "psnr": ("PSNR dB", "{:.2f}"), "ssim": ("SSIM", "{:.4f}"), "gmsd": ("GMSD", "{:.4f}"),
    "lpips": ("LPIPS", "{:.4f}"),
    "physics_error": ("off the physics (radii)", "{:.3f}"),
    "physics_dense_error": ("off the dense balls (radii)", "{:.3f}"),
    "error": ("estimated error", "{:.4f}"), "density": ("density", "{:.3f}"), "cost": ("cost", "{:.3f}"),
    SPEEDUP: ("speed-up", "{:.2f}x"),
}  # fmt: skip
COMPARED = ("psnr", "ssim", "gmsd", "lpips", "physics_error", "error", "cost", SPEEDUP)
Values = dict[str, dict[str, PromptValues]]  # setting -> metric -> prompt -> value


@dataclass(frozen=True)
class EvaluationReport(Report):
    """A report of the lab with the worst prompts, side by side, and the rows that failed."""

    worst: Sequence[Mapping[str, Any]] = ()
    failed: Sequence[Mapping[str, Any]] = ()

    def page(self) -> str:
        own = (files(PACKAGE) / "templates" / "evaluate.css").read_text(encoding="utf-8").strip()
        sheet = "\n".join((style("lab.css"), own))
        return render_page(
            "evaluate.html", PACKAGE, report=self, style=sheet, worst=self.worst, failed=self.failed
        )


def make_report(
    suite: Suite,
    rows: Sequence[dict[str, Any]],
    wanted: int,
    scores: RowScores,
    reasons: Mapping[str, str],
    manifest: Mapping[str, Any],
    command: str,
) -> dict[str, bytes]:
    """Every file of the report, by name.

    Args:
        suite: What was evaluated.
        rows: Every row that is done or failed.
        wanted: How many rows the suite has.
        scores: Of others, by row.
        reasons: Why a scorer could not score.
        manifest: Versions and runs.
        command: The command line that repeats it.
    """
    done = [{**row, **scores.get(row["id"], {})} for row in rows if row["status"] == DONE]
    failed = [row for row in rows if row["status"] == FAILED]
    names = sorted({name for found in scores.values() for name in found})
    values = collect(suite, done, names)
    worst = worst_prompts(suite, done)
    report = EvaluationReport(
        title=suite.name,
        lead=_lead(suite, len(done), wanted),
        command=command,
        tables=_tables(suite, values, names, done),
        pictures=_pictures(suite, done),
        warnings=_warnings(done, failed, wanted, manifest),
        facts=_facts(suite, done, reasons, manifest),
        data=_data(values, worst, failed, done),
        worst=worst,
        failed=failed,
    )
    every = [{**row, **scores.get(row["id"], {})} for row in rows]
    return {**report.files(), "rows.parquet": rows_table(every, names)}


def collect(suite: Suite, done: Sequence[Mapping[str, Any]], scores: Sequence[str] = ()) -> Values:
    """Every metric of every setting, prompt by prompt."""
    dense = [row for row in done if row["id"] == row["reference"]]
    found: Values = {}
    for setting in suite.settings:
        rows = [row for row in done if row["setting"] == setting.name]
        metrics = {
            name: prompt_values(rows, name)
            for name in (*METRICS, "seconds", "pflops", *scores)
            if name != SPEEDUP
        }
        metrics[SPEEDUP] = speedups(rows, dense)
        found[setting.name] = metrics
    # What dense attention would have cost is known from the sparse rows of the same prompts.
    sparse = [row for row in done if row.get("dense_pflops") is not None]
    found[suite.settings[0].name]["pflops"] = prompt_values(sparse, "dense_pflops")
    return found


def _tables(
    suite: Suite, values: Values, scores: Sequence[str], done: Sequence[Mapping[str, Any]]
) -> list[Table]:
    made = [_first_table(values, scores, done), _median_table(values, scores), _speed_table(values)]
    differences = _difference_table(suite, values, scores)
    return made if differences is None else [*made, differences]


def _first_table(values: Values, scores: Sequence[str], done: Sequence[Mapping[str, Any]]) -> Table:
    """The paper's Table 1: a mean with its interval and the median, wherever there is a value."""
    unit, factor = flops_unit(
        found.mean for metrics in values.values() if (found := estimate(metrics["pflops"])) is not None
    )
    forms = {**METRICS, **{name: (name, "{:.4f}") for name in scores}}
    cells = {
        title: [_cell(estimate(metrics[metric]), form) for metrics in values.values()]
        for metric, (title, form) in forms.items()
    }
    cells[unit] = [_scaled(estimate(metrics["pflops"]), factor) for metrics in values.values()]
    cells["balls kept"] = [_kept([row for row in done if row["setting"] == name]) for name in values]
    shown, rows = _filled(list(values), cells)
    return Table(
        "Quality and efficiency (the paper's Table 1)", ("setting", *shown), rows,
        note="mean [95 % interval from a bootstrap over prompts]. Distances are from the "
        f"dense clip of the same prompt and seed; the row {FLOOR!r} is the floor: dense against dense, its "
        "attention summed in another order. Cost is that of the sparse calls as a share of dense attention.",
    )  # fmt: skip


def _median_table(values: Values, scores: Sequence[str]) -> Table:
    forms = {**METRICS, **{name: (name, "{:.4f}") for name in scores}}
    cells = {
        title: [_median(estimate(metrics[metric]), form) for metrics in values.values()]
        for metric, (title, form) in forms.items()
    }
    shown, rows = _filled(list(values), cells)
    return Table("Medians", ("setting", *shown), rows, note="Over prompts, seeds averaged first.")


def _filled(
    names: Sequence[str], cells: dict[str, list[str]]
) -> tuple[list[str], tuple[tuple[str, ...], ...]]:
    """Titles of the columns that hold any value, and the lines of a table of them."""
    shown = {title: column for title, column in cells.items() if any(cell != "-" for cell in column)}
    return list(shown), tuple((name, *line) for name, *line in zip(names, *shown.values(), strict=True))


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
        "Speed", ("setting", "seconds", "speed-up", "middle half (all)"), tuple(rows),
        note="Of the whole generation, against the dense clip of the same prompt and seed, on one hardware.",
    )  # fmt: skip


def _difference_table(suite: Suite, values: Values, scores: Sequence[str]) -> Table | None:
    """Every two sparse settings, prompt by prompt."""
    names = [setting.name for setting in suite.settings if setting.sparsity is not None]
    pairs = list(itertools.combinations(names, 2))
    forms = {**METRICS, **{name: (name, "{:.4f}") for name in scores}}
    cells = {
        forms[metric][0]: [
            _difference(paired(values[a][metric], values[b][metric]), forms[metric][1]) for a, b in pairs
        ]
        for metric in (*COMPARED, *scores)
    }
    shown, rows = _filled([f"{a} - {b}" for a, b in pairs], cells)
    if not pairs or not shown:
        return None
    return Table(
        "Paired differences", ("settings", *shown), rows,
        note="Mean difference on the same prompts [95 % interval]; * where the interval leaves out zero.",
    )  # fmt: skip


def worst_prompts(suite: Suite, done: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The prompts whose sparse clips are farthest from the dense ones, each with the clips of one seed."""
    sparse = {setting.name for setting in suite.settings if setting.sparsity is not None}
    rows = [row for row in done if row["setting"] in sparse and row["psnr"] is not None]
    means = prompt_values(rows, "psnr")
    found = []
    for prompt in sorted(means, key=lambda key: (means[key], key))[:WORST]:
        lowest = min((row for row in rows if prompt_key(row) == prompt), key=lambda row: row["psnr"])
        clips = [row for row in done if row["reference"] == lowest["reference"]]
        order = [setting.name for setting in suite.settings]
        clips.sort(key=lambda row: order.index(row["setting"]))
        found.append(
            {
                "prompt": lowest["prompt"], "seed": lowest["seed"], "psnr": means[prompt],
                "clips": [
                    {"setting": row["setting"], "video": row["video"], "remark": _remark(row)}
                    for row in clips
                ],
            }
        )  # fmt: skip
    return found


def _remark(row: Mapping[str, Any]) -> str:
    if row["identical"]:
        return "identical"
    return "" if row["psnr"] is None else f"{row['psnr']:.1f} dB"


def _pictures(suite: Suite, done: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """Error and cost by layer and by step, the mean over all rows."""
    pictures = []
    for of, label in (("layers", "layer"), ("steps", "step")):
        panels = {}
        for metric, title in (("error", "estimated error"), ("cost", "cost, share of dense")):
            lines = {
                setting.name: _profile([row for row in done if row["setting"] == setting.name], of, metric)
                for setting in suite.settings
            }
            lines = {name: points for name, points in lines.items() if points}
            if lines:
                panels[title] = lines
        if panels:
            pictures.append(
                Picture(
                    f"per-{label}", f"Error and cost per {label}",
                    f"Mean over all prompts and seeds; sparse calls only, numbered by {label}.",
                    curves(panels, label, ""),
                )
            )  # fmt: skip
    return pictures


def _profile(rows: Sequence[Mapping[str, Any]], of: str, metric: str) -> list[tuple[float, float]]:
    """(number, mean) of every layer or step that has a value."""
    found: dict[int, list[float]] = {}
    for row in rows:
        for number, part in enumerate((row[of] or [])[:MAX_PARTS]):
            if part[metric] is not None:
                found.setdefault(number, []).append(part[metric])
    return [(float(number), math.fsum(found[number]) / len(found[number])) for number in sorted(found)]


def _lead(suite: Suite, done: int, wanted: int) -> str:
    generation = suite.generation
    size = "" if generation.width is None else f", {generation.width} x {generation.height} pixels"
    return (
        f"{suite.model}: {len(suite.prompts)} prompt(s), {len(suite.seeds)} seed(s), {len(suite.settings)} "
        f"settings; {done} of {wanted} rows. {generation.steps or 'Default'} steps{size}."
    )


def _warnings(
    done: Sequence[Mapping[str, Any]], failed: Sequence[Any], wanted: int, manifest: Mapping[str, Any]
) -> list[str]:
    """What a reader must know before the numbers."""
    told = []
    prompts = len({prompt_key(row) for row in done})
    if prompts < ENOUGH_PROMPTS:
        told.append(
            f"{prompts} prompt(s): intervals of fewer than {ENOUGH_PROMPTS} are too narrow, no * is set."
        )
    missing = wanted - len(done) - len(failed)
    if missing:
        told.append(f"{missing} of {wanted} rows are missing: run the same command again.")
    if failed:
        told.append(f"{len(failed)} of {wanted} rows failed; they are listed below and in no mean.")
    identical = sum(bool(row["identical"]) for row in done)
    if identical:
        told.append(
            f"{identical} clip(s) are identical to the dense one: their PSNR is infinite and in no mean."
        )
    if len({json.dumps(run["versions"], sort_keys=True) for run in manifest["runs"]}) > 1:
        told.append("Rows were made with different versions of the software; the manifest has them.")
    if len({row["hardware"] for row in done}) > 1:
        told.append("Rows were made on different hardware: speed-ups are taken only where it is the same.")
    waited = max(((row["waited"] or 0.0) / row["seconds"] for row in done if row["seconds"]), default=0.0)
    if waited > MAX_WAITING:
        told.append(
            f"Other work held up as much as {waited:.0%} of a generation: seconds and speed-ups say little."
        )
    return told


def _facts(
    suite: Suite, done: Sequence[Mapping[str, Any]], reasons: Mapping[str, str], manifest: Mapping[str, Any]
) -> dict[str, str]:
    missing: dict[str, str] = {}
    for row in done:
        missing.update(_reasons(row["not_measured"]))
    identical = "the videos are identical"
    facts = {
        f"not measured: {name}": reason
        for name, reason in {**missing, **reasons}.items()
        if not reason.startswith(identical)
    }
    facts["seeds"] = ", ".join(map(str, suite.seeds))
    facts["hardware"] = "; ".join(sorted({row["hardware"] for row in done if row["hardware"]}))
    facts["versions"] = ", ".join(
        f"{name} {version}" for name, version in manifest["runs"][-1]["versions"].items() if version
    )
    for setting in suite.settings:
        if setting.options:
            facts[f"setting {setting.name}"] = ", ".join(
                f"{key} {value}" for key, value in setting.options.items()
            )
    notes = sorted({f"{row['setting']}: {row['notes']}" for row in done if row["notes"]})
    if notes:
        facts["notes"] = "; ".join(notes)
    return facts


def _reasons(text: str | None) -> dict[str, str]:
    """What a row says was not measured, and why; nothing if it is not as it was written."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(reason) for name, reason in found.items()} if isinstance(found, dict) else {}


def _data(
    values: Values,
    worst: Sequence[Any],
    failed: Sequence[Mapping[str, Any]],
    done: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Everything that the tables show, as numbers."""
    names = list(values)
    estimates = {
        name: {metric: _plain(estimate(found)) for metric, found in metrics.items() if found}
        for name, metrics in values.items()
    }
    differences = [
        {"first": a, "second": b, "metric": metric, **(_plain(found) or {})}
        for a, b in itertools.combinations(names, 2)
        for metric in values[a]
        if (found := paired(values[a][metric], values[b].get(metric, {}))) is not None
    ]
    keep = ("id", "prompt", "setting", "seed", "reason", "attempts")
    profiles = {
        name: {
            f"{metric}_per_{of[:-1]}": _profile([row for row in done if row["setting"] == name], of, metric)
            for of in ("layers", "steps")
            for metric in ("error", "cost")
        }
        for name in names
    }
    return {
        "estimates": estimates, "differences": differences, "worst": list(worst), "profiles": profiles,
        "failed": [{name: row[name] for name in keep} for row in failed],
    }  # fmt: skip


def _plain(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else {**asdict(found), "quartiles": list(found.quartiles)}


def _cell(found: Estimate | None, form: str) -> str:
    if found is None:
        return "-"
    interval = ""
    if found.low is not None and found.high is not None and found.low < found.high:
        interval = f" [{form.format(found.low)}, {form.format(found.high)}]"
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
        interval = f" [{signed.format(found.low)}, {signed.format(found.high)}]"
    return f"{signed.format(found.mean)}{interval}{' *' if found.excludes_zero else ''}"


def _kept(rows: Sequence[Mapping[str, Any]]) -> str:
    known = [row["physics_kept"] for row in rows if row["physics_kept"] is not None]
    return f"{sum(known)} of {len(known)} clips" if known else "-"
