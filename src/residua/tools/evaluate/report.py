"""The results of a suite as files: report.html, report.md, report.json, and all rows as rows.parquet."""

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..generate.method_table import MAX_WAITING
from ..reports.figure import curves
from ..reports.page import Page, Picture
from ..reports.table import counted
from .report_tables import Values, collect, tables
from .scorers import RowScores
from .statistics import ENOUGH_PROMPTS, Estimate, estimate, paired, prompt_key, prompt_values
from .store import DONE, FAILED, rows_table
from .suite import Suite

WORST = 10
MAX_PARTS = 200  # maximum of points of a line in the figure


def suite_report(
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
        scores: Scores from VBench, PBench or files, by row.
        reasons: Why a scorer could not run.
        manifest: Versions and runs.
        command: The command line that repeats it.
    """
    done = [{**row, **scores.get(row["id"], {})} for row in rows if row["status"] == DONE]
    failed = [row for row in rows if row["status"] == FAILED]
    names = sorted({name for found in scores.values() for name in found})
    values = collect(suite, done, names)
    worst = worst_prompts(suite, done)
    page = Page(
        title=suite.name,
        lead=_lead(suite, len(done), wanted),
        command=command,
        tables=tables(suite, values, names, done),
        pictures=_pictures(suite, done),
        warnings=_warnings(done, failed, wanted, manifest),
        facts=_facts(suite, done, reasons, manifest),
        data=_data(values, worst, failed, done),
        template="evaluate.html",
        more={"worst": worst, "failed": failed_prompts(failed)},
    )
    every = [{**row, **scores.get(row["id"], {})} for row in rows]
    return {**page.files(), "rows.parquet": rows_table(every, names)}


def worst_prompts(suite: Suite, done: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The prompts whose sparse clips are farthest from the dense ones, each with the clips of one seed."""
    sparse = {setting.name for setting in suite.settings if setting.asked is not None}
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
                "prompt": lowest["prompt"],
                "seed": lowest["seed"],
                "psnr": means[prompt],
                "clips": [{"setting": row["setting"], "video": row["video"], "remark": _remark(row)} for row in clips],
            }
        )
    return found


def failed_prompts(failed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Failed rows with the same prompt and reason together: a poisoned prompt fails in every setting."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in failed:
        found.setdefault((prompt_key(row), str(row["reason"])), []).append(row)
    return [{"prompt": rows[0]["prompt"], "reason": reason, "rows": rows} for (_, reason), rows in found.items()]


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
                    f"per-{label}",
                    f"Error and cost per {label}",
                    f"Mean over all prompts and seeds; sparse calls only, numbered by {label}.",
                    curves(panels, label, "", residua=suite.own_settings),
                )
            )
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
        f"{_model_name(suite.model)}: {counted(len(suite.prompts), 'prompt')}, "
        f"{counted(len(suite.seeds), 'seed')}, "
        f"{len(suite.settings)} settings; {done} of {wanted} rows. "
        f"{generation.steps or 'Default'} steps{size}."
    )


def _model_name(model: str) -> str:
    """Without the path of a folder on this machine: reports are published."""
    return Path(model).name if os.path.isabs(model) else model


def _warnings(
    done: Sequence[Mapping[str, Any]], failed: Sequence[Any], wanted: int, manifest: Mapping[str, Any]
) -> list[str]:
    """What a reader must know before reading the numbers."""
    told = []
    prompts = len({prompt_key(row) for row in done})
    if prompts < ENOUGH_PROMPTS:
        told.append(
            f"{counted(prompts, 'prompt')}: intervals of fewer than {ENOUGH_PROMPTS} are too narrow, no * is set."
        )
    missing = wanted - len(done) - len(failed)
    if missing:
        told.append(f"{missing} of {wanted} rows are missing: run the same command again.")
    if failed:
        told.append(f"{len(failed)} of {wanted} rows failed; they are listed below and not part of any mean.")
    identical = sum(bool(row["identical"]) for row in done)
    if identical:
        told.append(f"{identical} clip(s) are identical to the dense one: infinite PSNR, not part of any mean.")
    if len({json.dumps(run["versions"], sort_keys=True) for run in manifest["runs"]}) > 1:
        told.append("Rows were made with different versions of the software; the manifest lists them.")
    if len({row["hardware"] for row in done}) > 1:
        told.append("Rows were made on different hardware: speed-ups only compare rows made on the same hardware.")
    waited = max(((row["waited"] or 0.0) / row["seconds"] for row in done if row["seconds"]), default=0.0)
    if waited > MAX_WAITING:
        told.append(f"Other work held up as much as {waited:.0%} of a generation: seconds and speed-ups say little.")
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
            facts[f"setting {setting.name}"] = ", ".join(f"{key} {value}" for key, value in setting.options.items())
    notes = sorted({f"{row['setting']}: {row['notes']}" for row in done if row["notes"]})
    if notes:
        facts["notes"] = "; ".join(notes)
    return facts


def _reasons(text: str | None) -> dict[str, str]:
    """What was not measured for a row, and why; empty if the text is not as we wrote it."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(reason) for name, reason in found.items()} if isinstance(found, dict) else {}


def _data(
    values: Values, worst: Sequence[Any], failed: Sequence[Mapping[str, Any]], done: Sequence[Mapping[str, Any]]
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
        "estimates": estimates,
        "differences": differences,
        "worst": list(worst),
        "profiles": profiles,
        "failed": [{name: row[name] for name in keep} for row in failed],
    }


def _plain(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else {**asdict(found), "quartiles": list(found.quartiles)}
