"""Contact strips: a row of frames per clip, to look at what a model generates."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from residua.world.pipeline import WorldPipeline
from residua.world.renderer import render_video

from .clips import Clips, draw_clips

HELD_OUT_SEED = 1_000  # clips of this series are never trained on


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
    pipeline: WorldPipeline,
    path: Path,
    *,
    balls: tuple[float, float, float] = (1.0, 0.0, 0.0),
    clips: int = 4,
    size: int = 64,
    num_frames: int = 8,
    steps: int = 8,
    seed: int = 0,
) -> float:
    """Generates held-out clips with one, two and three balls in these shares and writes a strip: above each
    generated clip the true one. Returns the PSNR in dB against the true clips."""
    generator = torch.Generator().manual_seed(seed)
    held_out = draw_clips(HELD_OUT_SEED, 0, clips, balls)
    pairs = [true_and_generated(pipeline, held_out, i, generator, num_frames, steps, size) for i in range(clips)]
    contact_strip([clip for pair in pairs for clip in pair], path)
    return float(-10 * np.log10(np.mean([np.square(clip - real).mean() for real, clip in pairs])))


def true_and_generated(
    pipeline: WorldPipeline, clips: Clips, i: int, generator: torch.Generator, num_frames: int, steps: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Clip number i as it should be, and as the pipeline continues its first frame: [T, H, W, 3] in [0, 1] each."""
    scene, layout, paths = clips.scenes[i], clips.layouts[i], clips.paths[[i]]
    truth = (render_video(scene, layout, num_frames, size, size, paths) + 1) / 2  # [3, T, H, W]
    clip = pipeline(
        str(scene),
        image=truth[None, :, 0],
        height=size,
        width=size,
        num_frames=num_frames,
        num_inference_steps=steps,
        generator=generator,
    ).frames[0]  # type: ignore[union-attr]
    return truth.permute(1, 2, 3, 0).numpy(), clip
