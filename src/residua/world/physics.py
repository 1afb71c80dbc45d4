"""Physics as a metric: do the balls of a clip still move as they should?

Balls are found by their colour, which the prompt names, and their paths are compared with those in another
video (the dense one) or with the simulator's. Pixel metrics say little about this: a ball that bounces a
moment too late costs few decibels, and a ball that dissolves for three frames hardly any.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from .renderer import frame_times, project
from .scenes import COLOURS, Layout, Scene
from .simulator import Paths, simulate

# A pixel belongs to a ball if it is at least this saturated, not black, and its hue is this near (degrees).
_SATURATION, _VALUE, _HUE = 0.58, 0.08, 20.0
_SEEN = 0.35  # share of its area in the first frame: a ball with less is lost in this frame
_WHOLE = 0.7  # share of a ball's pixels in one piece: with less it is torn
_INSIDE = 0.75  # share of the sum of two radii: balls with closer centres are merged
_TOLERATED = 0.1  # share of the frames in which a ball may be lost, torn or merged and still count as kept
# In radii, how far a path must fall before and rise after a bounce: a large hop counts as missed if absent, a
# small one is enough to match. Between the two a bounce may be there or not; otherwise a pixel would decide.
_LARGE_HOP, _SMALL_HOP = 0.35, 0.15
_LATE = 2 / 31  # share of the clip: a bounce this early or late is the same bounce


@dataclass(frozen=True)
class Track:
    """One ball over T frames, in pixels."""

    colour: str
    centre: np.ndarray  # [T, 2] x, y (downwards); NaN where the ball is not seen
    radius: float
    torn: np.ndarray  # [T] bool

    @property
    def seen(self) -> np.ndarray:
        return ~np.isnan(self.centre[:, 0])


@dataclass(frozen=True)
class Physics:
    """How closely the balls of a video follow their reference. Zero everywhere is perfect."""

    position_error: float  # mean distance from the reference, in radii, where both are seen
    worst_error: float  # the largest distance, in radii
    lost: int  # balls that are missing in more than a tenth of the frames
    torn: int  # balls in pieces in more than a tenth of the frames
    merged: int  # pairs of balls inside each other in more than a tenth of the frames
    missing_bounces: int  # bounces of the reference without one within two frames of 32
    extra_bounces: int
    balls: int
    bounces: int  # in the reference

    @property
    def kept(self) -> bool:
        """Whether no ball was lost, torn or merged with another."""
        return not self.balls_lost

    @property
    def balls_lost(self) -> int:
        """How many balls were lost, torn or merged with another."""
        return self.lost + self.torn + self.merged

    @property
    def bounces_missed(self) -> int:
        """How many bounces are missing or too many."""
        return self.missing_bounces + self.extra_bounces

    def __str__(self) -> str:
        return (
            f"{self.position_error:.2f} radii off (worst {self.worst_error:.2f}); "
            f"lost {self.lost}, torn {self.torn}, merged {self.merged} of {self.balls} balls; "
            f"bounces missing {self.missing_bounces}, "
            f"extra {self.extra_bounces} of {self.bounces}"
        )


def physics_of(video: np.ndarray | Tensor, scene: Scene, reference: np.ndarray | Tensor | Layout | Paths) -> Physics:
    """The physics of a clip [T, H, W, 3] in [0, 1]. The reference is another video of the same size, or the layout
    or simulated paths of the scene if they are known."""
    pixels = _pixels(video)
    colours = [ball.colour for ball in scene.balls]
    if isinstance(reference, (np.ndarray, Tensor)):
        other = _pixels(reference)
        if other.shape != pixels.shape:
            raise InputError(f"videos of shapes {pixels.shape} and {other.shape}: wanted two of one shape")
        wanted = track_balls(other, colours)
    else:
        paths = reference if isinstance(reference, Paths) else simulate([scene], [reference])
        wanted = true_tracks(scene, paths, *pixels.shape[:3])
    return compare_tracks(track_balls(pixels, colours), wanted)


def track_balls(video: np.ndarray, colours: list[str]) -> list[Track]:
    """Balls of these colours, words of the vocabulary, in every frame of a video [T, H, W, 3] in [0, 1]: a track
    each, with the radius of the first frame in which the ball is seen."""
    hue, saturation, value = _hue_saturation_value(np.asarray(video, dtype=np.float32))
    solid = (saturation > _SATURATION) & (value > _VALUE)
    tracks = []
    for colour in colours:
        own = _hue_saturation_value(np.array(COLOURS[colour], dtype=np.float32))[0]
        away = np.abs((hue - own + 180) % 360 - 180)
        tracks.append(_track(solid & (away < _HUE), colour))
    return tracks


def true_tracks(scene: Scene, paths: Paths, num_frames: int, height: int, width: int) -> list[Track]:
    """Where the simulator's balls are in a picture of so many pixels, one track per ball of the scene."""
    places = paths.at(frame_times(num_frames)[None])[0].double()  # [K, T, 2]
    x, y, scale = project(places[..., 0], places[..., 1])
    centre = torch.stack([(x + 1) * width / 2 - 0.5, (y * width + height) / 2 - 0.5], dim=-1).numpy()
    radius = (paths.radius[0, :, None] * scale[:, :1]).numpy()[:, 0] * width / 2
    never = np.zeros(num_frames, dtype=bool)
    return [Track(ball.colour, centre[k], float(radius[k]), never) for k, ball in enumerate(scene.balls)]


def compare_tracks(tracks: list[Track], wanted: list[Track]) -> Physics:
    """The differences between the balls of a clip and those of its reference, which come in the same order."""
    distances, missing, extra, bounces = [], 0, 0, 0
    lost = torn = 0
    for track, want in zip(tracks, wanted, strict=True):
        both = track.seen & want.seen
        offset = (track.centre - want.centre)[both]
        distances.append(np.hypot(offset[:, 0], offset[:, 1]) / want.radius)
        lost += bool((~track.seen & want.seen).mean() > _TOLERATED)
        torn += bool((track.torn & ~want.torn).mean() > _TOLERATED)
        tolerance = max(1.0, _LATE * (len(track.centre) - 1))
        missing += _unmatched(find_bounces(want, _LARGE_HOP), find_bounces(track, _SMALL_HOP), tolerance)
        extra += _unmatched(find_bounces(track, _LARGE_HOP), find_bounces(want, _SMALL_HOP), tolerance)
        bounces += len(find_bounces(want, _LARGE_HOP))
    merged = 0
    for i in range(len(tracks)):
        for j in range(i):
            apart = ~_inside(wanted[i], wanted[j])
            merged += bool((_inside(tracks[i], tracks[j]) & apart).mean() > _TOLERATED)
    flat = np.concatenate(distances) if distances else np.zeros(0)
    return Physics(
        position_error=float(flat.mean()) if flat.size else float("nan"),
        worst_error=float(flat.max()) if flat.size else float("nan"),
        lost=lost,
        torn=torn,
        merged=merged,
        missing_bounces=missing,
        extra_bounces=extra,
        balls=len(tracks),
        bounces=bounces,
    )


def find_bounces(track: Track, hop: float) -> list[int]:
    """Frames in which a ball turns from falling to rising: its lowest points, where the path falls by `hop` radii
    before and rises by as much after."""
    frames = np.flatnonzero(track.seen)
    depth = track.centre[frames, 1] / track.radius  # grows downwards
    found = []
    lowest, highest, falling = 0, 0, False
    for i in range(1, len(frames)):
        if falling:
            if depth[i] > depth[lowest]:
                lowest = i
            elif depth[lowest] - depth[i] > hop:
                found.append(int(frames[lowest]))
                falling, highest = False, i
        elif depth[i] < depth[highest]:
            highest = i
        elif depth[i] - depth[highest] > hop:
            falling, lowest = True, i
    return found


def _pixels(video: np.ndarray | Tensor) -> np.ndarray:
    pixels = video.detach().cpu().numpy() if isinstance(video, Tensor) else np.asarray(video)
    if pixels.ndim != 4 or pixels.shape[-1] != 3 or pixels.size == 0:
        raise InputError(f"a video of shape {pixels.shape}: wanted [T, H, W, 3] in [0, 1]")
    return pixels


def _hue_saturation_value(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    red, green, blue = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    value = rgb.max(-1)
    saturation = (value - rgb.min(-1)) / np.maximum(value, 1e-6)
    hue = np.degrees(np.arctan2(3**0.5 * (green - blue), 2 * red - green - blue))
    return hue, saturation, value


def _track(mask: np.ndarray, colour: str) -> Track:
    """mask [T, H, W]: the pixels of a colour."""
    pieces = _label(mask)
    frames = len(mask)
    centre, area, torn = np.full((frames, 2), np.nan), np.zeros(frames), np.zeros(frames, dtype=bool)
    for t in range(frames):
        labels, counts = np.unique(pieces[t][mask[t]], return_counts=True)
        if len(labels) == 0:
            continue
        body = _fill_rows(pieces[t] == labels[counts.argmax()])
        y, x = np.nonzero(body)
        centre[t], area[t] = (x.mean(), y.mean()), len(x)
        torn[t] = counts.max() < _WHOLE * counts.sum()
    first = area[np.flatnonzero(area)[0]] if area.any() else 0.0
    unseen = area < max(_SEEN * first, 1.0)
    centre[unseen] = np.nan
    torn[unseen] = False
    return Track(colour, centre, max(float(np.sqrt(first / np.pi)), 1e-6), torn)


def _label(mask: np.ndarray) -> np.ndarray:
    """Connected pieces within each frame: pixels of a piece have the same number; 0 is outside."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        grown = labels.copy()
        grown[:, 1:] = np.maximum(grown[:, 1:], labels[:, :-1])
        grown[:, :-1] = np.maximum(grown[:, :-1], labels[:, 1:])
        grown[:, :, 1:] = np.maximum(grown[:, :, 1:], labels[:, :, :-1])
        grown[:, :, :-1] = np.maximum(grown[:, :, :-1], labels[:, :, 1:])
        grown *= mask
        if np.array_equal(grown, labels):
            return labels
        labels = grown


def _fill_rows(body: np.ndarray) -> np.ndarray:
    """Fill the highlight: everything between the first and the last pixel of a row."""
    from_left = np.maximum.accumulate(body, axis=1)
    from_right = np.maximum.accumulate(body[:, ::-1], axis=1)[:, ::-1]
    return from_left & from_right


def _inside(a: Track, b: Track) -> np.ndarray:
    offset = a.centre - b.centre
    with np.errstate(invalid="ignore"):
        return np.hypot(offset[:, 0], offset[:, 1]) < _INSIDE * (a.radius + b.radius)


def _unmatched(wanted: list[int], found: list[int], tolerance: float) -> int:
    """How many of `wanted` have no partner of their own in `found`."""
    free = list(found)
    missing = 0
    for frame in wanted:
        partner = min(free, key=lambda other: abs(other - frame), default=None)
        if partner is None or abs(partner - frame) > tolerance:
            missing += 1
        else:
            free.remove(partner)
    return missing
