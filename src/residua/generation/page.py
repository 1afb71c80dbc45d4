"""The report of a comparison: one HTML file that loads nothing else, and the files around it."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import json_text
from ..lab.report import render_page, style
from .comparison import Comparison
from .floor import MEANING as FLOOR
from .floor import floor_text
from .flops import flops_unit
from .physics import MEANING as PHYSICS
from .videos import (
    contact_sheet,
    difference,
    encode_mp4,
    encode_png,
    encode_webp,
    enlarged,
    side_by_side,
    to_pixels,
)

if TYPE_CHECKING:
    from ..world.physics import Physics, Track

TEMPLATES = "residua.generation", "templates"
STAGES = ("grouping", "routing", "summary", "probes", "attention", "reconstruction", "exact rows")


@dataclass(frozen=True)
class Card:
    """One figure at the top of the page."""

    title: str
    value: str
    remark: str


def result_files(comparison: Comparison, fps: int, command: str) -> dict[str, bytes]:
    """Every file of a comparison by its name."""
    sparse = to_pixels(comparison.sparse.clip.frames)
    clips = {"sparse": sparse}
    if comparison.dense is not None:
        clips = {"dense": to_pixels(comparison.dense.timed.clip.frames), "sparse": sparse}
    captions = _captions(comparison)
    large = {captions[name]: enlarged(pixels) for name, pixels in clips.items()}
    made = {f"{name}.mp4": encode_mp4(enlarged(pixels), fps) for name, pixels in clips.items()}
    made["side-by-side.webp"] = encode_webp(side_by_side(large), fps)
    made["contact-sheet.png"] = encode_png(contact_sheet({captions[n]: p for n, p in clips.items()}))
    made["report.json"] = report_json(comparison)
    made["report.html"] = report_page(comparison, fps, command)
    return made


def report_json(comparison: Comparison) -> bytes:
    return (json_text.dumps(comparison.to_dict(), indent=2) + "\n").encode()


def report_page(comparison: Comparison, fps: int, command: str) -> bytes:
    """The page. Everything inserted is escaped; it runs only its own script and loads nothing."""
    script = (files(TEMPLATES[0]) / TEMPLATES[1] / "report.js").read_text(encoding="utf-8").strip()
    unit, factor = flops_unit([comparison.pflops(dense=True), comparison.pflops(dense=False)])
    page = render_page(
        "report.html",
        TEMPLATES[0],
        facts=comparison.to_dict(),
        cards=_cards(comparison),
        clips=_clips(comparison, fps),
        difference=_difference(comparison, fps),
        physics=_physics(comparison),
        floor=FLOOR if comparison.floor is not None else None,
        layers=_layers(comparison),
        stages=_stages(comparison),
        curve=_curve(comparison.quality.psnr_per_frame),
        frames=len(comparison.sparse.clip.frames),
        fps=fps,
        command=command,
        script=script,
        style=style("report.css", package=TEMPLATES[0]),
        flops_unit=unit,
        flops_factor=factor,
        script_hash=_base64(hashlib.sha256(script.encode()).digest()),
    )
    return page.encode()


def _captions(comparison: Comparison) -> dict[str, str]:
    if comparison.dense is None:
        return {"sparse": f"sparse  {comparison.sparse.median:.1f} s"}
    return {
        "dense": f"dense  {comparison.dense.timed.median:.1f} s",
        "sparse": f"sparse  {comparison.sparse.median:.1f} s, {comparison.speedup:.2f}x",
    }


def _clips(comparison: Comparison, fps: int) -> list[dict[str, str]]:
    """The sparse clip, and the dense one below it if there is one."""
    shown = [comparison.sparse.clip.frames]
    if comparison.dense is not None:
        shown.insert(0, comparison.dense.timed.clip.frames)
    return [{"source": _source(to_pixels(frames), fps)} for frames in shown]


def _difference(comparison: Comparison, fps: int) -> dict[str, str] | None:
    if comparison.dense is None:
        return None
    pixels, top = difference(comparison.sparse.clip.frames, comparison.dense.timed.clip.frames)
    levels = f"{255 * top:.2g} of 255 levels" if top else ""
    return {"source": _source(pixels, fps), "top": f"{top:.2g}" if top else "", "levels": levels}


def _source(pixels: np.ndarray, fps: int) -> str:
    return "data:video/mp4;base64," + _base64(encode_mp4(enlarged(pixels), fps))


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _cards(comparison: Comparison) -> list[Card]:
    seconds = f"{comparison.sparse.median:.1f} s"
    if comparison.dense is not None:
        seconds = f"{comparison.dense.timed.median:.1f} s dense, {seconds} sparse, whole generation"
    if comparison.cpu_speedup is not None:
        seconds += f"; {comparison.cpu_speedup:.2f}x in processor time"
    weights = comparison.quality.lpips is not None  # without the weights a footnote says why
    return [
        Card("Speed-up", _number(comparison.speedup, "{:.2f}x"), seconds),
        Card("Cost", _number(comparison.cost, "{:.1%}"), _cost_remark(comparison)),
        Card("Density", _number(comparison.density, "{:.1%}"), _density_remark(comparison)),
        _quality_card(comparison, "PSNR", "{:.1f} dB", "sparse against dense"),
        _quality_card(comparison, "SSIM", "{:.4f}", "1 is identical"),
        _quality_card(comparison, "GMSD", "{:.4f}", "differences of edges; 0 is identical"),
        *([_quality_card(comparison, "LPIPS", "{:.4f}", "AlexNet v0.1; 0 is identical")] if weights else []),
        *_physics_cards(comparison),
    ]


def _physics_cards(comparison: Comparison) -> list[Card]:
    found = None if comparison.physics is None else comparison.physics.from_dense
    if found is None or not np.isfinite(found.position_error):
        return []
    remark = "of the ball off its dense path, mean over the frames"
    return [Card("Physics", f"{found.position_error:.3f} radii", remark)]


def _quality_card(comparison: Comparison, title: str, form: str, remark: str) -> Card:
    """A metric, with its value between two dense videos beside it."""
    name, found, floor = title.lower(), comparison.quality, comparison.floor
    lowest = None if floor is None else floor_text(floor, name, form)
    if lowest is not None:
        remark += f"; floor {lowest}"
    return Card(title, _number(getattr(found, name), form), found.not_measured.get(name, remark))


def _physics(comparison: Comparison) -> dict[str, Any] | None:
    """Paths and figures of the balls; None except for clips of the model in the box."""
    found = comparison.physics
    if found is None:
        return None
    # Sparse comes last, so that it is drawn over the others.
    paths = [
        _path(kind, track)
        for kind, tracks in (("truth", found.truth), ("dense", found.dense), ("sparse", found.sparse))
        for track in tracks or []
    ]
    compared = {
        "sparse, dense": found.from_dense,
        "sparse, simulator": found.from_truth,
        "dense, simulator": found.dense_from_truth,
    }
    names = {"truth": "simulator", "dense": "dense", "sparse": "sparse"}
    shown = {path["kind"] for path in paths}
    return {
        "paths": paths,
        "kinds": [(kind, name) for kind, name in names.items() if kind in shown],
        "rows": [_physics_row(name, one) for name, one in compared.items() if one is not None],
        "meaning": PHYSICS,
        "picture": "data:image/png;base64,"
        + _base64(encode_png(to_pixels(comparison.sparse.clip.frames[:1])[0])),
    }


def _path(kind: str, track: Track) -> dict[str, str]:
    """`points_by_frame` has one entry per frame, `-` where the ball is not seen."""
    seen = track.seen
    places = [f"{x:.2f},{y:.2f}" if ok else "-" for (x, y), ok in zip(track.centre + 0.5, seen, strict=True)]
    points = " ".join(place for place in places if place != "-")
    size = 0.22 * track.radius
    return {"kind": kind, "points": points, "points_by_frame": " ".join(places), "dot": f"{size:.2f}"}


def _physics_row(name: str, physics: Physics) -> dict[str, str]:
    known = np.isfinite(physics.position_error)
    lost = physics.lost + physics.torn + physics.merged
    missed = physics.missing_bounces + physics.extra_bounces
    return {
        "name": name,
        "mean": f"{physics.position_error:.3f}" if known else "not seen",
        "worst": f"{physics.worst_error:.3f}" if known else "",
        "lost": f"{lost} of {physics.balls}",
        "missed": f"{missed} of {physics.bounces}",
    }


def _cost_remark(comparison: Comparison) -> str:
    if comparison.cost is None:
        return "every call stayed dense"
    dense = comparison.report.total.dense_heads
    return "of dense attention: pairs, router and summary" + (f"; {dense} heads ran dense" if dense else "")


def _density_remark(comparison: Comparison) -> str:
    total = comparison.report.total
    if total.density is None:
        return "every call stayed dense"
    share = _number(total.density_with_dense, "{:.1%}")
    return f"of the pairs in {total.sparse} sparse calls; {share} with the {total.dense_calls} dense ones"


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)


def _layers(comparison: Comparison) -> list[dict[str, Any]]:
    """What each layer did. Bars of cost are percentages of dense attention, bars of error are relative to the
    largest."""
    layers = [
        (transformer.name, layer)
        for transformer in comparison.report.transformers
        for layer in transformer.layers
    ]
    longest = max((layer.error for _, layer in layers if layer.error is not None), default=0.0) or 1.0
    return [
        {
            "name": layer.name if len(comparison.report.transformers) == 1 else f"{owner}.{layer.name}",
            "cost": layer.cost,
            "cost_bar": 100 * min(1.0, layer.cost or 0.0),  # above 1 if dense heads were probed
            "density": layer.density,
            "error": layer.error,
            "error_bar": 100 * (layer.error or 0.0) / longest,
            "heads": ", ".join(f"{choice} {heads}" for choice, heads in layer.chosen.items() if heads),
            "sparse": layer.sparse,
            "dense": layer.dense_calls,
            "seconds": layer.seconds,
        }
        for owner, layer in layers
    ]


def _stages(comparison: Comparison) -> list[dict[str, Any]]:
    """Where the time of the sparse generation went; dense calls and everything else come last."""
    total = comparison.report.total
    if not total.stages:
        return []
    parts = {name: total.stages.get(name, 0.0) for name in STAGES}
    parts["receipts and layout"] = max(0.0, total.sparse_seconds - sum(total.stages.values()))
    parts["attention that stayed dense"] = total.dense_seconds
    parts["rest of the model"] = max(0.0, comparison.sparse.clip.seconds - total.seconds)
    whole = sum(parts.values()) or 1.0
    return [
        {"name": name, "seconds": seconds, "share": 100 * seconds / whole, "colour": place}
        for place, (name, seconds) in enumerate(parts.items())
        if seconds > 0.0005 * whole
    ]


def _curve(values: tuple[float | None, ...]) -> dict[str, Any] | None:
    """PSNR over the frames as the points of a polyline in a box of 600 x 120."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    low, high = np.floor(min(known)) - 1, np.ceil(max(known)) + 1
    step = 600 / (len(values) - 1)
    points = [
        f"{step * place:.1f},{120 * (high - value) / (high - low):.1f}"
        for place, value in enumerate(values)
        if value is not None
    ]
    return {"points": " ".join(points), "low": f"{low:.0f}", "high": f"{high:.0f}"}
