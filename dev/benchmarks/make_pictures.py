"""Makes the pictures of the README and of the model's card: `python -m dev.benchmarks.make_pictures`.

Scenes of the model in the box that nothing was tuned on: as an animation, dense above sparse above their
difference (docs/images/demo.webp), and as a sheet of frames with the simulator's clip above both
(docs/images/world-strip.png). Prints the physics. The times in the animation are means over the scenes; on a
machine that does other work too, give those of a quiet one: --seconds DENSE SPARSE.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from residua import accelerate
from residua.tools.generate.loading import WORLD, PipelinePlacement, load
from residua.tools.generate.run import Request, generate
from residua.tools.generate.videos import contact_sheet, difference, encode_png, encode_webp, enlarged, to_pixels
from residua.tools.metrics.physics import run_physics
from residua.tools.metrics.video_quality import psnr
from residua.tools.reports.figure import INK, REFERENCE, RESIDUA
from residua.world.held_out import DEMO_PROMPT, REPORT_PROMPTS
from residua.world.renderer import render_video
from residua.world.scenes import default_layout, parse_prompt

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SECONDS = 2  # of a clip
PROMPTS = (DEMO_PROMPT, REPORT_PROMPTS[4], REPORT_PROMPTS[3], REPORT_PROMPTS[1])  # four floors, colours, skies
PIXELS = 192  # of a clip in the animation
GAP = 8
LABEL = 40


@dataclass(frozen=True)
class Pair:
    """One scene generated dense and sparse; frames are [T, H, W, 3] in [0, 1]."""

    prompt: str
    dense: np.ndarray
    sparse: np.ndarray
    seconds: tuple[float, float]
    cost: float


def true_clip(prompt: str, frames: int) -> np.ndarray:
    scene = parse_prompt(prompt)
    video = (render_video(scene, default_layout(scene), frames, 64, 64) + 1) / 2  # [3, T, H, W]
    return video.permute(1, 2, 3, 0).numpy()


def generate_pair(pipe: object, request: Request, quality: str) -> Pair:
    dense = generate(pipe, request)
    with accelerate(pipe, quality=quality, min_tokens=0) as handle:
        sparse = generate(pipe, request)
        cost = handle.report().total.cost
    found = run_physics(pipe, request, sparse.frames, dense.frames)
    assert found is not None and cost is not None
    print(
        f"{request.prompt}: {psnr(sparse.frames, dense.frames):.1f} dB, {dense.seconds:.1f} s dense, "
        f"{sparse.seconds:.1f} s sparse; sparse from dense: {found.from_dense}"
    )
    print(f"  sparse from the simulator: {found.from_truth}\n  dense: {found.dense_from_truth}", flush=True)
    return Pair(request.prompt, dense.frames, sparse.frames, (dense.seconds, sparse.seconds), cost)


def animation(pairs: Sequence[Pair], seconds: tuple[float, float]) -> np.ndarray:
    """Three rows of clips under their labels; bars are as long as the times.  # [T, H', W', 3] uint8"""
    slow, fast = seconds
    work = float(np.mean([pair.cost for pair in pairs]))
    # One scale for all scenes.
    gaps, top = difference(
        np.concatenate([pair.sparse for pair in pairs], axis=2), np.concatenate([pair.dense for pair in pairs], axis=2)
    )
    rows = (
        (f"dense attention: {slow:.1f} s a video", REFERENCE, 1.0, [to_pixels(pair.dense) for pair in pairs]),
        (
            f"sparse attention: {fast:.1f} s a video, {slow / fast:.1f} times as fast, with {work:.0%} of "
            "the work of attention",
            RESIDUA,
            fast / slow,
            [to_pixels(pair.sparse) for pair in pairs],
        ),
        (
            f"where they differ: white is a difference of {255 * top:.0f} or more of 255 levels",
            None,
            0.0,
            np.split(gaps, len(pairs), axis=2),
        ),
    )
    shown = [_row(*row) for row in rows]
    return np.concatenate(shown, axis=1)


def _row(text: str, colour: str | None, share: float, clips: Sequence[np.ndarray]) -> np.ndarray:
    margin = ((0, 0), (0, GAP), (GAP // 2, GAP // 2), (0, 0))
    large = [np.pad(enlarged(clip, PIXELS), margin, constant_values=255) for clip in clips]
    row = np.concatenate(large, axis=2)
    label = Image.new("RGB", (row.shape[2], LABEL), "white")
    draw, left = ImageDraw.Draw(label), GAP // 2
    draw.text((left, 4), text, fill=INK, font=ImageFont.load_default(17))
    if colour is not None:
        draw.rectangle((left, 28, left + share * (row.shape[2] - GAP) - 1, 34), fill=colour)
    return np.concatenate([np.broadcast_to(np.asarray(label), (len(row), *label.size[::-1], 3)), row], axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quality", default="balanced")
    parser.add_argument("--seconds", type=float, nargs=2, metavar=("DENSE", "SPARSE"))
    given = parser.parse_args()
    pipe = load(WORLD, PipelinePlacement(device="cpu"))
    generate(pipe, Request(DEMO_PROMPT, steps=1, frames=given.frames))  # the first call pays for imports
    pairs = [
        generate_pair(pipe, Request(prompt, steps=given.steps, frames=given.frames), given.quality)
        for prompt in PROMPTS
    ]
    write(pairs, given.seconds or np.mean([pair.seconds for pair in pairs], axis=0), IMAGES)


def write(pairs: Sequence[Pair], seconds: tuple[float, float], folder: Path) -> None:
    frames = len(pairs[0].dense)
    made = encode_webp(animation(pairs, tuple(seconds)), max(1, frames // SECONDS))
    folder.joinpath("demo.webp").write_bytes(made)
    rows = {}
    for pair in pairs[:3]:
        clips = {"simulator": true_clip(pair.prompt, frames), "dense": pair.dense, "sparse": pair.sparse}
        rows |= {f"{name}: {pair.prompt}": to_pixels(clip) for name, clip in clips.items()}
    folder.joinpath("world-strip.png").write_bytes(encode_png(contact_sheet(rows)))


if __name__ == "__main__":
    with torch.no_grad():
        main()
