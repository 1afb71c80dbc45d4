"""VBench and PBench, benchmarks that score videos without a reference. They are large, bring their own models and
need a GPU for most of them: Residua runs one if the user has installed it, and otherwise says so."""

import importlib.util
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import InputError

DIMENSIONS = ("imaging_quality", "subject_consistency")  # of VBench; what the paper reports
CLASSES = {"vbench": ("vbench", "VBench"), "pbench": ("pbench", "PBench")}  # module, class; same interface
NOT_INSTALLED = {
    "vbench": "VBench is not installed: pip install vbench, in an environment of its own",
    "pbench": "PBench is not installed: it is `predict` of github.com/SHI-Labs/physical-ai-bench",
}


def why_missing(name: str = "vbench") -> str | None:
    """None if the benchmark can be imported, else the reason why not."""
    found = importlib.util.find_spec(CLASSES[name][0])
    return NOT_INSTALLED[name] if found is None or found.origin is None else None


def run_benchmark(
    name: str,
    videos: Path,
    dimensions: Sequence[str],
    folder: Path,
    device: str,
    label: str = "residua",
    prompts: Mapping[str, str] | None = None,
) -> dict[str, Any] | str:
    """Runs a benchmark on a video or on a folder of videos.

    Args:
        name: "vbench" or "pbench".
        videos: The file or folder.
        dimensions: What is scored.
        folder: Where it writes; it is made.
        device: Where it runs.
        label: The name of its result.
        prompts: The prompt of each video in a folder, by file name.

    Returns:
        The results as it wrote them, {dimension: [mean, [one entry per video]]}, or the reason why there are none.
    """
    module, class_name = CLASSES[name]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return NOT_INSTALLED[name]
    folder.mkdir(exist_ok=True)
    described = {} if prompts is None else {"prompt_list": dict(prompts)}
    try:
        scorer = getattr(importlib.import_module(module), class_name)(
            device, str(Path(spec.origin).with_name("VBench_full_info.json")), str(folder)
        )
        scorer.evaluate(
            videos_path=str(videos), name=label, dimension_list=list(dimensions), mode="custom_input", **described
        )
    # It downloads and runs models: whatever that raises must not lose videos that took hours.
    except Exception as error:
        return f"{class_name} failed ({type(error).__name__}: {error})"
    results = folder / f"{label}_eval_results.json"
    if not results.is_file():
        return f"{class_name} ran and wrote no results"
    try:
        found = json.loads(results.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{results}: cannot be read as JSON ({error})") from error
    return found if isinstance(found, dict) else f"{class_name} wrote results in a form that is not known"


def vbench(video: str | Path, dimensions: tuple[str, ...] = DIMENSIONS, device: str = "cuda") -> dict[str, float] | str:
    """Scores of one video file per dimension, or the reason why nothing was measured."""
    if not Path(video).is_file():
        raise InputError(f"{video}: no such file; wanted a video")
    with tempfile.TemporaryDirectory() as folder:
        found = run_benchmark("vbench", Path(video), dimensions, Path(folder), device)
    if isinstance(found, str):
        return found
    try:
        scores = {name: float(found[name][0]) for name in dimensions}
    except (KeyError, IndexError, TypeError, ValueError):
        return "VBench wrote results in a form that is not known"
    return scores if all(map(math.isfinite, scores.values())) else "VBench returned NaN"


def vbench_clip(content: bytes, device: str) -> dict[str, float] | str:
    """The same for an encoded mp4 that is not a file yet."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        path.write_bytes(content)
        return vbench(path, device=device)
