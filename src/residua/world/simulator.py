"""The physics of the little world: balls in a plane that fall, bounce and collide.

Flight is integrated exactly (constant gravity), contacts are found at the end of a short step. Energy never
grows: a floor contact returns at most the energy that the ball had when it touched, a collision at most the
energy of the two balls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .scenes import CEILING, WALL, Layout, Scene, physics_arrays

GRAVITY = 6.0  # metres per second squared
DURATION = 2.0  # seconds of a clip, however many frames it has
SAMPLES = 129  # recorded positions, evenly spaced over the clip
_SUBSTEPS = 8  # per sample
_REST_SPEED = 0.2  # a ball that would leave the floor more slowly stays on it


@dataclass(frozen=True)
class Paths:
    """The paths of the balls of B clips; K is MAX_BALLS."""

    position: Tensor  # [B, K, SAMPLES, 2]
    velocity: Tensor  # [B, K, SAMPLES, 2]
    radius: Tensor  # [B, K], 0 where there is no ball

    def at(self, time: Tensor) -> Tensor:
        """Positions [B, K, N, 2] at any times [B, N] in [0, 1], linear between samples."""
        place = time.clamp(0, 1) * (SAMPLES - 1)
        before = place.floor().clamp(max=SAMPLES - 2).long()
        index = before[:, None, :, None].expand(-1, self.position.shape[1], -1, 2)
        low, high = self.position.gather(2, index), self.position.gather(2, index + 1)
        return torch.lerp(low, high, (place - before)[:, None, :, None])

    def __getitem__(self, rows: slice | list[int]) -> Paths:
        return Paths(self.position[rows], self.velocity[rows], self.radius[rows])


def simulate(scenes: list[Scene], layouts: list[Layout]) -> Paths:
    """Simulates the balls of many clips at once. The paths depend on nothing but the arguments."""
    arrays = physics_arrays(scenes, layouts)
    position, velocity, radius = arrays["start"], arrays["velocity"], arrays["radius"]
    step = DURATION / ((SAMPLES - 1) * _SUBSTEPS)
    positions, velocities = [position.copy()], [velocity.copy()]
    for _ in range(SAMPLES - 1):
        for _ in range(_SUBSTEPS):
            _fly(position, velocity, radius, step)
            _bounce(position, velocity, radius, arrays["restitution"])
            _collide(position, velocity, radius, arrays["restitution"])
        positions.append(position.copy())
        velocities.append(velocity.copy())

    def tensor(values: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(values, axis=2)).float()

    return Paths(tensor(positions), tensor(velocities), torch.from_numpy(radius).float())


def energy(paths: Paths) -> Tensor:
    """Kinetic and potential energy of all balls of B clips, [B, SAMPLES]; masses are proportional to the radius
    cubed."""
    kinetic = 0.5 * paths.velocity.double().square().sum(-1)
    potential = GRAVITY * paths.position[..., 1].double()
    return (paths.radius.double().pow(3)[..., None] * (kinetic + potential)).sum(1)


def _fly(position: np.ndarray, velocity: np.ndarray, radius: np.ndarray, step: float) -> None:
    lying = (position[..., 1] <= radius) & (velocity[..., 1] == 0)
    gravity = np.where(lying, 0.0, GRAVITY)
    position += velocity * step
    position[..., 1] -= 0.5 * gravity * step**2
    velocity[..., 1] -= gravity * step


def _bounce(position: np.ndarray, velocity: np.ndarray, radius: np.ndarray, restitution: np.ndarray) -> None:
    x, y = position[..., 0], position[..., 1]
    vx, vy = velocity[..., 0], velocity[..., 1]
    landed = (y < radius) & (vy < 0)
    # The speed at the moment of contact, which is shortly before the end of the step.
    speed = np.sqrt(np.maximum(vy**2 - 2 * GRAVITY * (radius - y), 0.0))
    rebound = restitution * speed
    vy[landed] = np.where(rebound < _REST_SPEED, 0.0, rebound)[landed]
    y[landed] = radius[landed]
    for hit, axis in (
        ((x > WALL - radius) & (vx > 0), vx),
        ((x < radius - WALL) & (vx < 0), vx),
        ((y > CEILING - radius) & (vy > 0), vy),
    ):
        axis[hit] *= -restitution[hit]


def _collide(position: np.ndarray, velocity: np.ndarray, radius: np.ndarray, restitution: np.ndarray) -> None:
    for i in range(radius.shape[1]):
        for j in range(i):
            offset = position[:, i] - position[:, j]
            distance = np.hypot(offset[:, 0], offset[:, 1])
            touching = (distance < radius[:, i] + radius[:, j]) & (radius[:, i] > 0) & (radius[:, j] > 0)
            if not touching.any():
                continue
            normal = offset / np.maximum(distance, 1e-9)[:, None]
            closing = -((velocity[:, i] - velocity[:, j]) * normal).sum(1)
            hit = touching & (closing > 0)
            bounce = 1 + 0.5 * (restitution[:, i] + restitution[:, j])
            mass_i, mass_j = radius[:, i] ** 3, radius[:, j] ** 3
            impulse = np.where(hit, bounce * closing / np.maximum(mass_i + mass_j, 1e-9), 0.0)[:, None] * normal
            velocity[:, i] += mass_j[:, None] * impulse
            velocity[:, j] -= mass_i[:, None] * impulse
