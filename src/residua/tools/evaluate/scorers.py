"""Scores from outside: runs VBench and PBench on the videos if they are installed, and reads files of
scores."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import InputError
from ...util.json_text import is_finite
from ..metrics.vbench import DIMENSIONS, run_benchmark
from ..output import publish_files
from .suite import Suite

MAX_SCORE_BYTES = 256 << 20
SCORED = {
    "vbench": DIMENSIONS,
    "pbench": (
        "aesthetic_quality",
        "background_consistency",
        "imaging_quality",
        "motion_smoothness",
        "overall_consistency",
        "subject_consistency",
    ),
}
PERCENT = ("imaging_quality",)  # both give it out of 1 for all videos, and out of 100 for each
RowScores = dict[str, dict[str, float]]  # row id -> name -> score


def join_scores(
    folder: Path, suite: Suite, rows: Sequence[Mapping[str, Any]], device: str | None = None
) -> tuple[RowScores, dict[str, str]]:
    """Every score by row, and the reasons for scores that are missing.

    Args:
        folder: The folder of the suite.
        suite: Which scorers to run and which files to read.
        rows: The rows that are done.
        device: Where scorers run; None: on a GPU if there is one.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    scores: RowScores = {}
    reasons: dict[str, str] = {}
    for name in suite.scorers:
        for setting in suite.settings:
            mine = [row for row in rows if row["setting"] == setting.name]
            if mine:
                found = _cached(folder, name, setting.name, mine, device)
                if isinstance(found, str):
                    reasons[name] = found
                else:
                    _merge(scores, from_results(found, mine, name))
    for path in suite.scores:
        _merge(scores, read_scores(Path(path), rows))
    return scores, reasons


def _cached(
    folder: Path, name: str, setting: str, rows: Sequence[Mapping[str, Any]], device: str
) -> dict[str, Any] | str:
    """What a scorer wrote for exactly these clips earlier, or else what it says now."""
    path = folder / "scores" / f"{name} {setting}.json"
    hashes = sorted(str(row["hash"]) for row in rows)
    if path.is_file():
        kept = _json(path)
        if isinstance(kept, dict) and kept.get("hashes") == hashes and isinstance(kept.get("results"), dict):
            return dict(kept["results"])
    videos, prompts = folder / "videos" / setting, {Path(row["video"]).name: row["prompt"] for row in rows}
    label = f"{name}-{setting}"
    found = run_benchmark(name, videos, SCORED[name], folder / "scores", device, label, prompts)
    if not isinstance(found, str):
        publish_files({path: json.dumps({"hashes": hashes, "results": found}).encode()})
    return found


def from_results(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], prefix: str) -> RowScores:
    """Reads {dimension: [mean, [{video_path, video_results}]]}, the format of VBench and PBench. Every score
    is out of 1."""
    by_name = {(row["setting"], Path(row["video"]).name): row["id"] for row in rows}
    scores: RowScores = {}
    for dimension, entry in results.items():
        if not isinstance(entry, list) or len(entry) < 2 or not isinstance(entry[1], list):
            continue
        for one in entry[1]:
            if not isinstance(one, Mapping):
                continue
            path = Path(str(one.get("video_path", "")))
            row_id = by_name.get((path.parent.name, path.name))
            value = one.get("video_results")
            if row_id is not None and is_finite(value):
                score = float(value) / 100 if dimension in PERCENT else float(value)
                scores.setdefault(row_id, {})[f"{prefix} {dimension}"] = score
    return scores


def read_scores(path: Path, rows: Sequence[Mapping[str, Any]]) -> RowScores:
    """Reads a file of the user's: results of VBench or PBench (.json), or rows with `setting`, `prompt`,
    `seed` and any scores (.csv, .jsonl)."""
    if path.stat().st_size > MAX_SCORE_BYTES:
        raise InputError(f"{path}: larger than {MAX_SCORE_BYTES >> 20} MiB; wanted scores")
    if path.suffix == ".json":
        found = _json(path)
        scores = from_results(found, rows, path.stem) if isinstance(found, dict) else {}
        if not scores:
            raise InputError(f"{path}: no score of a video of this suite; wanted results of VBench or PBench")
        return scores
    by_row = {(row["setting"], row["prompt"], row["seed"]): row["id"] for row in rows}
    scores = {}
    for number, entry in enumerate(_entries(path), 1):
        try:
            key = (str(entry["setting"]), str(entry["prompt"]), int(entry["seed"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise InputError(f"{path}, row {number}: wanted setting, prompt, seed and scores") from None
        if key in by_row:
            scores[by_row[key]] = _numbers(entry, f"{path}, row {number}")
    if not scores:
        raise InputError(f"{path}: none of its rows belongs to this suite (setting, prompt and seed must match)")
    return scores


def _entries(path: Path) -> Iterable[Mapping[str, Any]]:
    if path.suffix not in (".csv", ".jsonl"):
        raise InputError(f"{path}: wanted .json, .jsonl or .csv")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".csv":
            return list(csv.DictReader(io.StringIO(text)))
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise InputError(f"{path}: not valid {'CSV' if path.suffix == '.csv' else 'JSON lines'} ({error})") from error


def _numbers(entry: Mapping[str, Any], where: str) -> dict[str, float]:
    found = {}
    for name, value in entry.items():
        if name in ("setting", "prompt", "seed") or value in (None, ""):
            continue
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{where}: {name} = {value!r} is not a number") from None
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _merge(into: RowScores, more: RowScores) -> None:
    for row_id, scores in more.items():
        into.setdefault(row_id, {}).update(scores)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
