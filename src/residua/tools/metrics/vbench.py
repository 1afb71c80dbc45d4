"""A hook for VBench, a benchmark that scores a video without a reference. It is large, brings its own models
and needs a GPU for most of them: Residua runs it if the user has installed it, and otherwise says so."""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from ...errors import InputError

DIMENSIONS = ("imaging_quality", "subject_consistency")  # what the paper reports
NOT_INSTALLED = "VBench is not installed: pip install vbench, in an environment of its own"


def installed() -> str | None:
    """None if VBench can be imported, else the reason why not."""
    found = importlib.util.find_spec("vbench")
    return NOT_INSTALLED if found is None or found.origin is None else None


def vbench(video: str | Path, dimensions: tuple[str, ...] = DIMENSIONS, device: str = "cuda") -> dict[str, float] | str:
    """Scores of one video file per dimension, or the reason why nothing was measured."""
    if not Path(video).is_file():
        raise InputError(f"{video}: no such file; wanted a video")
    found = importlib.util.find_spec("vbench")
    if found is None or found.origin is None:
        return NOT_INSTALLED
    from vbench import VBench

    descriptions = Path(found.origin).with_name("VBench_full_info.json")
    with tempfile.TemporaryDirectory() as folder:
        try:
            scorer = VBench(device, str(descriptions), folder)
            scorer.evaluate(
                videos_path=str(video), name="residua", dimension_list=list(dimensions), mode="custom_input"
            )
        # It downloads and runs models: whatever that raises must not lose a video that took an hour.
        except Exception as error:
            return f"VBench failed ({type(error).__name__}: {error})"
        results = Path(folder) / "residua_eval_results.json"
        if not results.is_file():
            return "VBench ran and wrote no results"
        return _scores(json.loads(results.read_text(encoding="utf-8")), dimensions)


def vbench_clip(content: bytes, device: str) -> dict[str, float] | str:
    """The same for an encoded mp4 that is not a file yet."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        path.write_bytes(content)
        return vbench(path, device=device)


def _scores(results: Any, dimensions: tuple[str, ...]) -> dict[str, float] | str:
    """VBench writes {dimension: [score, [one entry per video]]}."""
    try:
        scores = {name: float(results[name][0]) for name in dimensions}
    except (KeyError, IndexError, TypeError, ValueError):
        return "VBench wrote results in a form that is not known"
    return scores if all(map(math.isfinite, scores.values())) else "VBench returned NaN"
