"""Scenes of the little world, the prompts that describe them, and where their balls start.

A prompt names the floor, the time of day (sky and sun) and the colour, material and motion of every ball.
Motions are quantised: a prompt and the first frame, which shows where the balls are, determine the clip.
Lengths are in metres of the little world: x to the right, y up from the floor; balls move in the plane z = 0.
"""

import itertools
import re
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from ..errors import InputError

# Reflectance in [0, 1]; the hues are far apart and more saturated than any floor or sky.
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.12, 0.10),
    "yellow": (0.98, 0.76, 0.08),
    "green": (0.10, 0.66, 0.22),
    "blue": (0.10, 0.34, 0.92),
    "purple": (0.60, 0.20, 0.78),
}
# Coefficient of restitution.
MATERIALS: dict[str, float] = {"rubber": 0.8, "clay": 0.35}
# Velocity at the start, metres per second.
MOTIONS: dict[str, tuple[float, float]] = {
    "dropped": (0.0, 0.0),
    "thrown left": (-1.7, 0.8),
    "thrown right": (1.7, 0.8),
    "lobbed left": (-0.9, 2.4),
    "lobbed right": (0.9, 2.4),
    "rolling left": (-1.5, 0.0),
    "rolling right": (1.5, 0.0),
    "resting": (0.0, 0.0),
}
ON_THE_FLOOR = ("rolling left", "rolling right", "resting")
FLOORS: dict[str, tuple[float, float, float]] = {
    "sand": (0.80, 0.70, 0.54),
    "slate": (0.50, 0.58, 0.68),
    "moss": (0.50, 0.65, 0.52),
    "brick": (0.76, 0.56, 0.47),
}
TIMES = ("in the morning", "at noon", "in the evening")
MAX_BALLS = 3
RADII = ((0.54, 0.70), (0.48, 0.62), (0.42, 0.54))  # in scenes with one, two and three balls
WALL = 2.2  # the world ends at x = -WALL and x = WALL, and at this height:
CEILING = 3.1
_GAP = 0.12  # between two balls at the start
_WIDE, _NARROW = 20, 60  # failed attempts after which starts, then radii, are chosen more freely

_BALL = re.compile(r"an? (\w+) (\w+) ball (\w+(?: (?:left|right))?)")
_PLACE = re.compile(r"(\w+) floor (in the morning|at noon|in the evening|.*)")


class PromptError(InputError):
    """A prompt outside the closed vocabulary."""


@dataclass(frozen=True)
class Ball:
    """One ball as the prompt names it."""

    colour: str
    material: str
    motion: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.material} ball {self.motion}"


@dataclass(frozen=True)
class Scene:
    """A parsed prompt: a floor, a time of day and one to three balls of different colours."""

    floor: str
    time: str
    balls: tuple[Ball, ...]

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.balls))} on a {self.floor} floor {self.time}"


@dataclass(frozen=True)
class BallStart:
    """What the prompt leaves open: the radius of a ball and where its centre starts."""

    radius: float
    x: float
    y: float


Layout = tuple[BallStart, ...]


def vocabulary(max_balls: int = MAX_BALLS) -> str:
    """One line that shows the form of a prompt and lists all words, for error messages and help texts."""
    more = f" [and ... up to {max_balls} balls]" if max_balls > 1 else ""
    return (
        f"'a <colour> <material> ball <motion>{more} on a <floor> floor <time>'; "
        f"colours: {', '.join(COLOURS)}; materials: {', '.join(MATERIALS)}; "
        f"motions: {', '.join(MOTIONS)}; floors: {', '.join(FLOORS)}; times: {', '.join(TIMES)}"
    )


def parse_prompt(prompt: str, max_balls: int = MAX_BALLS) -> Scene:
    """The scene that a prompt such as "a red rubber ball thrown right on a sand floor at noon" describes; case does
    not matter.

    Raises:
        PromptError: Names the word that is wrong and the whole vocabulary."""

    def error(reason: str) -> PromptError:
        return PromptError(f"prompt {prompt!r}: {reason}; wanted {vocabulary(max_balls)}")

    text = " ".join(prompt.lower().rstrip(". ").split())
    head, _, ending = text.rpartition(" on a ")
    place = _PLACE.fullmatch(ending)
    if not head or place is None:
        raise error("it does not end with 'on a <floor> floor <time>'")
    floor, time = place.groups()
    if floor not in FLOORS:
        raise error(f"unknown floor {floor!r}")
    if time not in TIMES:
        raise error(f"unknown time {time!r}")
    parts = head.split(" and ")
    if len(parts) > max_balls:
        raise error(f"{len(parts)} balls, at most {max_balls} can be drawn")
    balls = []
    for part in parts:
        match = _BALL.fullmatch(part)
        if match is None:
            raise error(f"{part!r} does not read 'a <colour> <material> ball <motion>'")
        colour, material, motion = match.groups()
        known = (("colour", colour, COLOURS), ("material", material, MATERIALS), ("motion", motion, MOTIONS))
        for kind, word, words in known:
            if word not in words:
                raise error(f"unknown {kind} {word!r}")
        balls.append(Ball(colour, material, motion))
    colours = [ball.colour for ball in balls]
    if len(set(colours)) < len(colours):
        raise error("two balls of one colour")
    return Scene(floor, time, tuple(balls))


def random_scene(generator: torch.Generator, balls: int = 1) -> Scene:
    """A random prompt with so many balls of different colours; the first ball always moves, so that something
    happens."""
    order = torch.randperm(len(COLOURS), generator=generator).tolist()
    moving = [motion for motion in MOTIONS if motion != "resting"]
    members = []
    for rank in range(balls):
        motions = moving if rank == 0 else list(MOTIONS)
        material = _choice(list(MATERIALS), generator)
        members.append(Ball(list(COLOURS)[order[rank]], material, _choice(motions, generator)))
    return Scene(_choice(list(FLOORS), generator), _choice(TIMES, generator), tuple(members))


def random_layout(scene: Scene, generator: torch.Generator) -> Layout:
    """Random starts, one per ball; none overlap. Balls that move sideways start on the side that they leave or in
    the middle."""
    for attempt in itertools.count():
        layout = tuple(_random_start(ball, RADII[len(scene.balls) - 1], generator, attempt) for ball in scene.balls)
        if all(_apart(a, b) for i, a in enumerate(layout) for b in layout[:i]):
            return layout
    raise AssertionError("unreachable")


def default_layout(scene: Scene) -> Layout:
    """The layout of a prompt without an image: always the same for a scene."""
    seed = sum(ord(letter) * (i + 1) for i, letter in enumerate(str(scene)))
    return random_layout(scene, torch.Generator().manual_seed(seed))


def physics_arrays(scenes: list[Scene], layouts: list[Layout]) -> dict[str, np.ndarray]:
    """What the simulator needs of B scenes: start and velocity [B, MAX_BALLS, 2], radius and restitution [B,
    MAX_BALLS]; a radius of 0 is no ball."""
    shape = (len(scenes), MAX_BALLS)
    start, velocity = np.zeros((*shape, 2)), np.zeros((*shape, 2))
    radius, restitution = np.zeros(shape), np.zeros(shape)
    for row, (scene, layout) in enumerate(zip(scenes, layouts, strict=True)):
        for column, (ball, place) in enumerate(zip(scene.balls, layout, strict=True)):
            start[row, column] = place.x, place.y
            velocity[row, column] = MOTIONS[ball.motion]
            radius[row, column] = place.radius
            restitution[row, column] = MATERIALS[ball.material]
    return {"start": start, "velocity": velocity, "radius": radius, "restitution": restitution}


def _random_start(ball: Ball, radii: tuple[float, float], generator: torch.Generator, attempt: int = 0) -> BallStart:
    """After many attempts (`attempt`) balls may start anywhere, then they are made smaller."""
    radius = _uniform(*radii, generator) if attempt < _NARROW else radii[0]
    side = -np.sign(MOTIONS[ball.motion][0]) if attempt < _WIDE else 0
    x = side * _uniform(-0.3, WALL - radius - 0.05, generator)
    if side == 0:
        x = _uniform(radius + 0.05 - WALL, WALL - radius - 0.05, generator)
    y = radius
    if ball.motion not in ON_THE_FLOOR:
        y = _uniform(1.0, 1.8, generator) if ball.motion.startswith("lobbed") else _uniform(1.3, 2.3, generator)
    return BallStart(radius, float(x), y)


def _apart(a: BallStart, b: BallStart) -> bool:
    return bool(np.hypot(a.x - b.x, a.y - b.y) > a.radius + b.radius + _GAP)


_T = TypeVar("_T")


def _choice(items: list[_T] | tuple[_T, ...], generator: torch.Generator) -> _T:
    return items[int(torch.randint(len(items), (1,), generator=generator))]


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand(1, generator=generator))
