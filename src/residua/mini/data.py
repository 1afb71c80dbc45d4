"""Procedural clips: coloured shapes that move over a plain background, and the prompts that describe them.

Everything is a pure function of a prompt, a layout and pixel coordinates, so that training can render exactly
the pixels it needs (a subset of the tokens of a clip) and a demo can render a first frame without any file.
Coordinates: x and y run over [-1, 1] across the frame (y downwards), time over [0, 1] across the clip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import InputError

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.9, -0.8, -0.8),
    "green": (-0.7, 0.65, -0.6),
    "blue": (-0.7, -0.4, 0.95),
    "yellow": (0.95, 0.85, -0.7),
    "purple": (0.5, -0.7, 0.8),
    "orange": (0.95, 0.1, -0.8),
    "white": (0.95, 0.95, 0.95),
}
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "black": (-0.9, -0.9, -0.85),
    "grey": (-0.2, -0.2, -0.2),
    "brown": (-0.3, -0.55, -0.75),
    "teal": (-0.75, -0.3, -0.3),
}
SHAPES = ("circle", "square", "triangle", "diamond")
# The unit step of each motion in (x, y).
MOTIONS: dict[str, tuple[float, float]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
}
# How far an object travels in a clip, whatever the number of frames: the speed is not left open, so that the
# first frame and the prompt determine the clip and a small model need not guess.
TRAVEL = 0.9

_OBJECT = re.compile(r"an? (\w+) (\w+) moving (\w+)")


class PromptError(InputError):
    """A prompt outside the closed vocabulary."""


@dataclass(frozen=True)
class SceneObject:
    """One object as the prompt names it."""

    colour: str
    shape: str
    motion: str

    def __str__(self) -> str:
        article = "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.shape} moving {self.motion}"


@dataclass(frozen=True)
class Scene:
    """A parsed prompt: a background and one or two objects."""

    background: str
    objects: tuple[SceneObject, ...]

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.objects))} on a {self.background} background"


@dataclass(frozen=True)
class Placement:
    """The geometry that the prompt leaves open: radius and starting point of one object."""

    radius: float
    x: float
    y: float


def vocabulary(max_objects: int = 1) -> str:
    """The closed vocabulary in words, for error messages and help texts."""
    second = " [and a <colour> <shape> moving <direction>]" if max_objects > 1 else ""
    return (
        f"'a <colour> <shape> moving <direction>{second} on a <background> background'; "
        f"colours: {', '.join(COLOURS)}; shapes: {', '.join(SHAPES)}; "
        f"directions: {', '.join(MOTIONS)}; backgrounds: {', '.join(BACKGROUNDS)}"
    )


def parse_prompt(prompt: str, max_objects: int = 1) -> Scene:
    """Read a prompt; raises PromptError that names the offending word and the whole vocabulary."""

    def error(reason: str) -> PromptError:
        return PromptError(f"prompt {prompt!r}: {reason}; wanted {vocabulary(max_objects)}")

    text = " ".join(prompt.lower().rstrip(". ").split())
    head, separator, tail = text.rpartition(" on a ")
    background = tail.removesuffix(" background")
    if not separator or background == tail:
        raise error("it does not end with 'on a <background> background'")
    if background not in BACKGROUNDS:
        raise error(f"unknown background {background!r}")
    parts = head.split(" and ")
    if len(parts) > max_objects:
        raise error(f"{len(parts)} objects, at most {max_objects} can be drawn")
    objects = []
    for part in parts:
        match = _OBJECT.fullmatch(part)
        if match is None:
            raise error(f"{part!r} does not read 'a <colour> <shape> moving <direction>'")
        colour, shape, motion = match.groups()
        known = (("colour", colour, COLOURS), ("shape", shape, SHAPES), ("direction", motion, MOTIONS))
        for kind, word, words in known:
            if word not in words:
                raise error(f"unknown {kind} {word!r}")
        objects.append(SceneObject(colour, shape, motion))
    return Scene(background, tuple(objects))


def random_scene(generator: torch.Generator, two_objects: float = 0.0) -> Scene:
    """A random prompt; `two_objects` is the probability of a second object (of another colour)."""
    background = _choice(list(BACKGROUNDS), generator)
    count = 1 + (_uniform(0, 1, generator) < two_objects)
    order = torch.randperm(len(COLOURS), generator=generator).tolist()
    objects = [
        SceneObject(list(COLOURS)[order[i]], _choice(SHAPES, generator), _choice(list(MOTIONS), generator))
        for i in range(count)
    ]
    return Scene(background, tuple(objects))


def random_layout(scene: Scene, generator: torch.Generator) -> tuple[Placement, ...]:
    """A random layout: objects start anywhere in the half of the frame that they leave, or in the middle."""
    placements = []
    for item in scene.objects:
        radius = _uniform(0.42, 0.55, generator)
        start = _uniform(-0.6, -0.1, generator)
        placements.append(_place(item, radius, start, lane=_uniform(-0.45, 0.45, generator)))
    return tuple(placements)


def default_layout(scene: Scene) -> tuple[Placement, ...]:
    """The layout of a prompt without an image: every object crosses the frame, two of them side by side."""
    lanes = (0.0,) if len(scene.objects) == 1 else (-0.45, 0.45)
    return tuple(
        _place(item, 0.48, -TRAVEL / 2, lane) for item, lane in zip(scene.objects, lanes, strict=True)
    )


def _place(item: SceneObject, radius: float, start: float, lane: float) -> Placement:
    """`start` is the position along the direction of motion, `lane` the one across."""
    step_x, step_y = MOTIONS[item.motion]
    return Placement(radius, start * step_x + lane * abs(step_y), start * step_y + lane * abs(step_x))


def render(
    scene: Scene, layout: tuple[Placement, ...], x: Tensor, y: Tensor, time: Tensor, pixel: float
) -> Tensor:
    """Colours in [-1, 1] at the given coordinates (all of shape S) -> [*S, 3]; edges are anti-aliased over
    `pixel`, the width of a pixel."""
    image = torch.tensor(BACKGROUNDS[scene.background]).expand(*x.shape, 3)
    for item, place in zip(scene.objects, layout, strict=True):
        cover = (0.5 - _distance(item, place, x, y, time) / pixel).clamp(0, 1)[..., None]
        image = torch.lerp(image, torch.tensor(COLOURS[item.colour]), cover)
    return image


def object_distance(
    scene: Scene, layout: tuple[Placement, ...], x: Tensor, y: Tensor, time: Tensor
) -> Tensor:
    """Signed distance to the nearest object's outline (negative inside), of the coordinates' shape."""
    distances = [_distance(*pair, x, y, time) for pair in zip(scene.objects, layout, strict=True)]
    return torch.stack(distances).amin(0)


def render_video(
    scene: Scene, layout: tuple[Placement, ...], num_frames: int, height: int, width: int
) -> Tensor:
    """The true clip, [3, T, H, W] in [-1, 1]."""
    time, y, x = torch.meshgrid(*axes(num_frames, height, width), indexing="ij")
    return render(scene, layout, x, y, time, 2 / max(height, width)).permute(3, 0, 1, 2)


def axes(num_frames: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates of frames, rows and columns: time in [0, 1], pixel centres of y and x in (-1, 1)."""
    time = torch.arange(num_frames) / max(1, num_frames - 1)
    y = (torch.arange(height) + 0.5) / height * 2 - 1
    x = (torch.arange(width) + 0.5) / width * 2 - 1
    return time, y, x


def _distance(item: SceneObject, place: Placement, x: Tensor, y: Tensor, time: Tensor) -> Tensor:
    """Signed distance to one object's outline; areas are roughly equal for equal radii."""
    step_x, step_y = MOTIONS[item.motion]
    dx = x - place.x - TRAVEL * step_x * time
    dy = y - place.y - TRAVEL * step_y * time
    shape, radius = item.shape, place.radius
    if shape == "circle":
        return torch.hypot(dx, dy) - 0.95 * radius
    if shape == "square":
        return torch.maximum(dx.abs(), dy.abs()) - 0.85 * radius
    if shape == "triangle":
        return torch.maximum(dy - 0.8 * radius, (1.75 * dx.abs() - dy - radius) / 2.0156)
    assert shape == "diamond", shape
    return (dx.abs() + dy.abs() - 1.15 * radius) / 2**0.5


_T = TypeVar("_T")


def _choice(items: list[_T] | tuple[_T, ...], generator: torch.Generator) -> _T:
    return items[int(torch.randint(len(items), (1,), generator=generator))]


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand(1, generator=generator))
