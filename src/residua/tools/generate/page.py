"""The report of a comparison: one HTML file that loads nothing else, and the files around it."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...util import json_text
from ..metrics.physics import MEANING as PHYSICS
from ..reports.page import render, template_text
from .comparison import Comparison
from .flops import flops_unit
from .noise_floor import MEANING as NOISE_FLOOR
from .noise_floor import noise_floor_text
from .videos import contact_sheet, difference, encode_mp4, encode_png, encode_webp, enlarged, side_by_side, to_pixels

if TYPE_CHECKING:
    from ...world.physics import Physics, Track

STAGES = ("budget", "grouping", "routing", "summary", "probes", "attention", "reconstruction", "exact rows")


@dataclass(frozen=True)
class Card:
    """How close the sparse video is to the dense one, by one measure."""

    title: str
    value: str
    remark: str


@dataclass(frozen=True)
class BarPair:
    """Dense against sparse as two bars; `dense` is empty if there is no dense video."""

    title: str
    dense: str
    sparse: str
    share: float  # of the dense bar that the sparse one is long, per cent
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
    made["report.html"] = comparison_page(comparison, fps, command)
    return made


def report_json(comparison: Comparison) -> bytes:
    return (json_text.dumps(comparison.to_dict(), indent=2) + "\n").encode()


def comparison_page(comparison: Comparison, fps: int, command: str) -> bytes:
    """The page. Everything inserted is escaped; it runs only its own script and loads nothing."""
    script = template_text("comparison.js")
    unit, factor = flops_unit([comparison.pflops(dense=True), comparison.pflops(dense=False)])
    page = render(
        "comparison.html",
        headline=comparison.headline,
        facts=comparison.to_dict(),
        savings=_savings(comparison),
        cards=_cards(comparison),
        clips=_clips(comparison, fps),
        difference=_difference(comparison, fps),
        physics=_physics(comparison),
        noise_floor=NOISE_FLOOR if comparison.noise_floor is not None else None,
        layers=_layers(comparison),
        stages=_stages(comparison),
        curve=_curve(comparison.quality.psnr_per_frame),
        frames=len(comparison.sparse.clip.frames),
        fps=fps,
        command=command,
        script=script,
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
    """The video of the differences, the end of its scale (empty: there are none) and their mean."""
    if comparison.dense is None:
        return None
    video, reference = comparison.sparse.clip.frames, comparison.dense.timed.clip.frames
    pixels, top = difference(video, reference)
    mean = float(np.abs(video.astype(np.float32) - reference).mean())
    return {"source": _source(pixels, fps), "top": f"{255 * top:.2g}" if top else "", "mean": f"{255 * mean:.2g}"}


def _source(pixels: np.ndarray, fps: int) -> str:
    return "data:video/mp4;base64," + _base64(encode_mp4(enlarged(pixels), fps))


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _savings(comparison: Comparison) -> list[BarPair]:
    """What sparse attention saved: time, and work of attention."""
    made = [_time_saving(comparison)]
    if comparison.cost is not None:
        share, against = 100 * comparison.cost, "" if comparison.dense is None else "100%"
        work = BarPair("Work of attention", against, f"{share:.1f}%", min(100.0, share), _work_remark(comparison))
        made.append(work)
    return made


def _time_saving(comparison: Comparison) -> BarPair:
    sparse, baseline = comparison.sparse.median, comparison.dense
    title, remark = "Time of the whole generation", "includes the steps and layers that stay dense"
    if baseline is None:
        return BarPair(title, "", f"{sparse:.1f} s", 100.0, remark)
    dense = baseline.timed.median
    if comparison.cpu_speedup is not None:
        remark += f"; {comparison.cpu_speedup:.2f} times as fast in processor time"
    return BarPair(title, f"{dense:.1f} s", f"{sparse:.1f} s", min(100.0, 100 * sparse / dense), remark)


def _work_remark(comparison: Comparison) -> str:
    total = comparison.report.total
    remark = f"of {total.sparse} sparse calls, choosing what to skip included"
    if total.dense_calls:
        remark += f"; {total.dense_calls} more calls stayed dense"
    if total.dense_heads:
        remark += f"; {total.dense_heads} heads ran dense"
    if total.density is not None:
        remark += f". Pairs of tokens that were evaluated exactly: {total.density:.1%}"
        if total.dense_calls:
            remark += f", with the dense calls {total.density_with_dense:.1%}"
    return remark


def _cards(comparison: Comparison) -> list[Card]:
    if comparison.dense is None:
        return []
    weights = comparison.quality.lpips is not None  # without the weights a footnote says why
    return [
        _quality_card(comparison, "PSNR", "{:.1f} dB", "by pixels; higher is closer"),
        _quality_card(comparison, "SSIM", "{:.4f}", "by structure; 1 is identical"),
        _quality_card(comparison, "GMSD", "{:.4f}", "perceptual, by edges; 0 is identical"),
        *([_quality_card(comparison, "LPIPS", "{:.4f}", "AlexNet v0.1; 0 is identical")] if weights else []),
        *_physics_cards(comparison),
    ]


def _physics_cards(comparison: Comparison) -> list[Card]:
    found = None if comparison.physics is None else comparison.physics.from_dense
    if found is None or not np.isfinite(found.position_error):
        return []
    remark = "distance of the ball from its path in the dense video, in radii of the ball"
    return [Card("Physics", f"{found.position_error:.3f}", remark)]


def _quality_card(comparison: Comparison, title: str, form: str, remark: str) -> Card:
    """A metric, with its value between two dense videos beside it."""
    name, found, noise_floor = title.lower(), comparison.quality, comparison.noise_floor
    lowest = None if noise_floor is None else noise_floor_text(noise_floor, name, form)
    if lowest is not None:
        remark += f". Noise floor: {lowest}"
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
        "sparse against dense": found.from_dense,
        "sparse against the simulator": found.from_truth,
        "dense against the simulator": found.dense_from_truth,
    }
    names = {"truth": "simulator", "dense": "dense", "sparse": "sparse"}
    shown = {path["kind"] for path in paths}
    return {
        "paths": paths,
        "kinds": [(kind, name) for kind, name in names.items() if kind in shown],
        "rows": [_physics_row(name, one) for name, one in compared.items() if one is not None],
        "meaning": PHYSICS,
        "picture": "data:image/png;base64," + _base64(encode_png(to_pixels(comparison.sparse.clip.frames[:1])[0])),
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
    return {
        "name": name,
        "mean": f"{physics.position_error:.3f}" if known else "not seen",
        "worst": f"{physics.worst_error:.3f}" if known else "",
        "lost": f"{physics.balls_lost} of {physics.balls}",
        "missed": f"{physics.bounces_missed} of {physics.bounces}",
    }


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)


def _layers(comparison: Comparison) -> list[dict[str, Any]]:
    """What each layer did. Bars of cost are percentages of dense attention, bars of error are relative to the
    largest."""
    layers = [
        (transformer.name, layer) for transformer in comparison.report.transformers for layer in transformer.layers
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
    found = comparison.parts
    if not found:
        return []
    parts = {name: found.get(name, 0.0) for name in STAGES}
    parts["bookkeeping"] = found["layout"]
    parts["attention that stayed dense"] = found["dense"]
    parts["rest of the model"] = found["rest of the model"]
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
