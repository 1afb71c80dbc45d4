"""Pictures of the little world: shaded balls over a floor, soft shadows, a gradient sky, one sun.

Everything is a closed formula of pixel and time, so training can render exactly the pixels it needs (a subset
of the tokens of a clip), and a whole clip takes milliseconds. Tensors hold one component each: S is any shape
of pixels that broadcasts, usually [B, N, P] for the P pixels of each of N tokens (or frames) of B clips.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .scenes import COLOURS, FLOORS, MAX_BALLS, Layout, Scene
from .simulator import Paths, simulate

# The camera looks at the plane z = 0 from the front and a little from above.
_EYE_Y, _EYE_Z, _TILT, _ZOOM = 2.25, 6.4, 0.205, 0.36
_FORWARD_Y, _FORWARD_Z = -_TILT / (1 + _TILT**2) ** 0.5, -1 / (1 + _TILT**2) ** 0.5
_UP_Y, _UP_Z = -_FORWARD_Z, _FORWARD_Y

# Per time of day: direction to the sun, its colour, the sky at the horizon and above.
_LIGHTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "in the morning": ((-0.62, 0.70, 0.42), (1.00, 0.93, 0.82), (0.98, 0.88, 0.76), (0.60, 0.68, 0.88)),
    "at noon": ((0.12, 0.90, 0.42), (1.00, 1.00, 0.98), (0.86, 0.91, 0.95), (0.42, 0.62, 0.90)),
    "in the evening": ((0.64, 0.64, 0.42), (1.00, 0.87, 0.76), (0.96, 0.78, 0.70), (0.46, 0.44, 0.70)),
}
_AMBIENT, _DIFFUSE, _SHADOW = 0.36, 0.72, 0.55


@dataclass(frozen=True)
class Rays:
    """One ray per pixel, and where it meets the floor. All of shape S."""

    x: Tensor
    y: Tensor
    z: Tensor
    floor_x: Tensor
    floor_z: Tensor
    haze: Tensor  # 1 on the sky

    def __getitem__(self, index: Tensor) -> Rays:
        """The rays of flat pixel indices (any shape)."""
        return Rays(*(getattr(self, name).flatten()[index] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Look:
    """How the scenes of B clips look. Colours are [B, 3], those of the balls [B, K, 3]."""

    balls: Tensor
    floor: Tensor
    sun: Tensor  # direction
    sunlight: Tensor
    horizon: Tensor
    sky: Tensor


def look_of(scenes: list[Scene]) -> Look:
    """The colours and lights of B scenes."""
    balls = torch.zeros(len(scenes), MAX_BALLS, 3)
    for row, scene in enumerate(scenes):
        for column, ball in enumerate(scene.balls):
            balls[row, column] = torch.tensor(COLOURS[ball.colour])
    lights = torch.tensor([_LIGHTS[scene.time] for scene in scenes])  # [B, 4, 3]
    sun = lights[:, 0] / lights[:, 0].norm(dim=1, keepdim=True)
    floor = torch.tensor([FLOORS[scene.floor] for scene in scenes])
    return Look(balls, floor, sun, *lights[:, 1:].unbind(1))


@lru_cache(maxsize=8)
def camera_rays(height: int, width: int) -> Rays:
    """The rays of a whole picture, of shape [height, width]."""
    # The floor is as wide as the picture; a picture of another shape shows more or less of the sky and floor.
    across = (torch.arange(width) + 0.5) / width * 2 - 1
    upward = (1 - (torch.arange(height) + 0.5) / height * 2) * height / width
    w, u = torch.meshgrid(upward * _ZOOM, across * _ZOOM, indexing="ij")
    y, z = _FORWARD_Y + w * _UP_Y, _FORWARD_Z + w * _UP_Z
    length = (u * u + y * y + z * z).sqrt()
    x, y, z = u / length, y / length, z / length
    reach = torch.where(y < -1e-3, -_EYE_Y / y.clamp(max=-1e-3), torch.full_like(y, 1e4))
    haze = 1 - torch.exp(-(((reach - 4).clamp_min(0) / 8) ** 1.5))
    return Rays(x, y, z, x * reach, _EYE_Z + z * reach, torch.where(y < -1e-3, haze, torch.ones_like(haze)))


def project(x: Tensor, y: Tensor, z: Tensor | float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Where points of the world (x to the right, y above the floor, z towards the camera, in metres) are in a square
    picture: coordinates in [-1, 1] (to the right, downwards) and the length of a metre there."""
    offset_y, offset_z = y - _EYE_Y, torch.as_tensor(z) - _EYE_Z
    depth = offset_y * _FORWARD_Y + offset_z * _FORWARD_Z
    scale = 1 / (depth * _ZOOM)
    return x * scale, -(offset_y * _UP_Y + offset_z * _UP_Z) * scale, scale


def shade(look: Look, rays: Rays, centres: Tensor, radius: Tensor, pixel: float) -> Tensor:
    """Colours seen along rays, [B, N, P, 3] in [-1, 1].

    Args:
        look: Looks of B clips.
        rays: Of shape [B, N, P] or anything that broadcasts to it.
        centres: Centres of the balls, [B, K, N, 2].
        radius: Radii of the balls, [B, K].
        pixel: The width of a pixel in picture coordinates (2 / width), for smooth edges."""
    up = rays.y.clamp_min(0)
    height = (1 - torch.exp(-7 * up))[..., None]  # in the sky
    image = torch.lerp(_spread(look.horizon), _spread(look.sky), height)
    light = torch.ones(())
    for k in range(radius.shape[1]):
        light = light * _floor_light(look, rays, centres[:, k, :, None], radius[:, k, None, None])
    lit = _spread(look.floor * look.sunlight) * light[..., None]
    floor = torch.lerp(lit, _spread(look.horizon).expand_as(lit), rays.haze[..., None])
    image = torch.where((rays.haze < 1)[..., None], floor, image)
    for k in range(radius.shape[1]):
        image = _paint(image, look, rays, centres, radius, k, pixel)
    return image.clamp(0, 1) * 2 - 1


def render_video(
    scene: Scene, layout: Layout, num_frames: int, height: int, width: int, paths: Paths | None = None
) -> Tensor:
    """The true clip of a scene, [3, T, H, W] in [-1, 1]. It always lasts as long: more frames are finer in time.
    `paths` of the balls may be given if they are known already."""
    paths = simulate([scene], [layout]) if paths is None else paths
    time = frame_times(num_frames)[None]
    rays = camera_rays(height, width)
    rays = Rays(*(getattr(rays, name).view(1, 1, -1) for name in Rays.__dataclass_fields__))
    image = shade(look_of([scene]), rays, paths.at(time), paths.radius, 2 / width)  # [1, T, H * W, 3]
    return image[0].unflatten(1, (height, width)).permute(3, 0, 1, 2)


def frame_times(num_frames: int) -> Tensor:
    """Times of the frames of a clip, [T] from 0 to 1."""
    return torch.arange(num_frames) / max(1, num_frames - 1)


def shadow_place(look: Look, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Where on the floor the shadows of balls at `centres` [B, K, N, 2] fall: x and z, [B, K, N] each."""
    sun = look.sun[:, :, None, None]  # [B, 3, 1, 1]
    along = centres[..., 1] / sun[:, 1]
    return centres[..., 0] - sun[:, 0] * along, -sun[:, 2] * along


def _spread(colour: Tensor) -> Tensor:
    return colour[:, None, None]  # [B, 1, 1, 3]


def _floor_light(look: Look, rays: Rays, centre: Tensor, radius: Tensor) -> Tensor:
    """Share of the light that a ball (centre [B, N, 1, 2], radius [B, 1, 1]) leaves on the floor."""
    sun_x, sun_y, sun_z = (look.sun[:, i, None, None] for i in range(3))
    x, y, z = centre[..., 0] - rays.floor_x, centre[..., 1], -rays.floor_z
    square = x * x + y * y + z * z
    along = x * sun_x + y * sun_y + z * sun_z
    distance = (square - along * along).clamp_min(0).sqrt()  # from the ball's centre to the ray to the sun
    width = 0.04 + 0.16 * along.clamp_min(0)  # of the penumbra
    cover = ((radius + width - distance) / (2 * width)).clamp(0, 1)
    cover = cover * cover * (3 - 2 * cover)
    nearby = (y * radius**2 / square.clamp_min(1e-3) ** 1.5).clamp(0, 1)  # share of the hidden sky
    return torch.where(radius > 0, (1 - _SHADOW * cover) * (1 - 0.7 * nearby), torch.ones(()))


def _paint(image: Tensor, look: Look, rays: Rays, centres: Tensor, radius: Tensor, k: int, pixel: float) -> Tensor:
    """Paints ball k over the image."""
    rad = radius[:, k, None, None]
    x, y = -centres[:, k, :, None, 0], _EYE_Y - centres[:, k, :, None, 1]  # from the ball to the eye
    along = x * rays.x + y * rays.y + _EYE_Z * rays.z
    square = x * x + y * y + _EYE_Z**2
    miss = (square - along * along).clamp_min(0)  # squared distance of the ray from the centre
    cover = ((rad - miss.sqrt()) / (square.sqrt() * _ZOOM * pixel) + 0.5).clamp(0, 1) * (rad > 0)
    reach = -along - (rad * rad - miss).clamp_min(0).sqrt()
    normal = torch.stack([x + rays.x * reach, y + rays.y * reach, _EYE_Z + rays.z * reach])
    normal = normal / normal.norm(dim=0).clamp_min(1e-6)  # [3, S]
    sun = look.sun.T[:, :, None, None]
    lit = (normal * sun).sum(0).clamp_min(0)
    for j in range(radius.shape[1]):
        if j != k:
            offset = (centres[:, j] - centres[:, k])[:, :, None]  # [B, N, 1, 2]
            lit = lit * _ball_light(look, normal, rad, offset, radius[:, j, None, None])
    half = sun - torch.stack(torch.broadcast_tensors(rays.x, rays.y, rays.z))
    shine = ((normal * half).sum(0) / half.norm(dim=0)).clamp_min(0)
    upward = 0.5 + 0.5 * normal[1]
    ambient = _AMBIENT * (
        upward[..., None] * (0.6 + 0.4 * _spread(look.sky)) + 0.6 * (1 - upward[..., None]) * _spread(look.floor)
    )
    colour = look.balls[:, k, None, None] * (ambient + _DIFFUSE * lit[..., None] * _spread(look.sunlight))
    colour = colour + (0.55 * shine**40 * (lit > 0))[..., None]
    return torch.lerp(image, colour, cover[..., None].expand_as(colour))


def _ball_light(look: Look, normal: Tensor, radius: Tensor, offset: Tensor, other: Tensor) -> Tensor:
    """Share of the sunlight that another ball at `offset` leaves on a ball's surface."""
    x, y = offset[..., 0] - radius * normal[0], offset[..., 1] - radius * normal[1]
    z = -radius * normal[2]
    sun_x, sun_y, sun_z = (look.sun[:, i, None, None] for i in range(3))
    along = x * sun_x + y * sun_y + z * sun_z
    distance = (x * x + y * y + z * z - along * along).clamp_min(0).sqrt()
    width = 0.04 + 0.16 * along.clamp_min(0)
    cover = ((other + width - distance) / (2 * width)).clamp(0, 1) * (along > 0)
    return torch.where(other > 0, 1 - cover * cover * (3 - 2 * cover), torch.ones(()))
