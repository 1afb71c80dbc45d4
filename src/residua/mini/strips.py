"""Contact strips: a row of frames per clip, for looking at what a model makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from . import data
from .pipeline import MiniVideoPipeline

PROMPTS = (
    "a red circle moving right on a grey background",
    "a yellow triangle moving up on a teal background",
    "a blue square moving left on a black background",
    "a white diamond moving down on a brown background",
)


def contact_strip(clips: list[np.ndarray], path: Path, columns: int = 8, zoom: int = 2) -> None:
    """Clips [T, H, W, 3] in [0, 1], one row each, evenly spaced frames from the first to the last."""
    rows = []
    for clip in clips:
        picked = clip[np.linspace(0, len(clip) - 1, min(columns, len(clip))).round().astype(int)]
        picked = np.pad(picked, ((0, 0), (0, 2), (0, 2), (0, 0)), constant_values=1.0)
        rows.append(np.concatenate(list(picked), axis=1))
    pixels = (np.concatenate(rows).clip(0, 1) * 255).round().astype(np.uint8)
    image = Image.fromarray(pixels)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST).save(path)


def sample_strip(
    pipeline: MiniVideoPipeline,
    path: Path,
    *,
    prompts: tuple[str, ...] = PROMPTS,
    size: int = 64,
    num_frames: int = 8,
    steps: int = 12,
    guidance_scale: float = 1.0,
    seed: int = 0,
) -> float:
    """Generate a clip per prompt (random layouts) and write the strip; returns the PSNR in dB against the
    true clips: first frame and prompt determine a clip, so there is a truth to compare with."""
    generator = torch.Generator().manual_seed(seed)
    clips, errors = [], []
    for prompt in prompts:
        scene = data.parse_prompt(prompt)
        truth = data.render_video(scene, data.random_layout(scene, generator), num_frames, size, size)
        clip = pipeline(
            prompt,
            image=(truth[None, :, 0] + 1) / 2,
            height=size,
            width=size,
            num_frames=num_frames,
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            generator=generator,
        ).frames[0]  # type: ignore[union-attr]
        clips.append(clip)
        errors.append(np.square(clip - (truth.permute(1, 2, 3, 0).numpy() + 1) / 2).mean())
    contact_strip(clips, path)
    return float(-10 * np.log10(np.mean(errors)))
