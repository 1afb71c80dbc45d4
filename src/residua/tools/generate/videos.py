"""Frames as files: mp4, animated WebP, contact sheet. Everything is encoded in memory, so that a file is
written completely or not at all."""

import io
from fractions import Fraction
from typing import Any

import numpy as np

from ...errors import InputError

MIN_PIXELS = 384  # smaller clips are enlarged: chroma subsampling and players blur 64 pixels
LABEL = 22  # height of a caption
PAPER, INK = (255, 255, 255), (30, 30, 40)
# Colours of the difference, from 0 to the end of the scale: black, amber, white.
HEAT = ((0.0, (8, 10, 16)), (0.45, (150, 74, 32)), (0.8, (229, 178, 90)), (1.0, (255, 255, 255)))
WITHIN_SCALE = 99.9  # per cent of the pixels that lie within the scale of the difference


def to_pixels(video: Any) -> np.ndarray:
    """One clip as a pipeline returned it, floats in [0, 1] or PIL images, as pixels.  # [T, H, W, 3] uint8"""
    frames = np.stack([np.asarray(frame) for frame in video])
    if frames.ndim != 4 or frames.shape[-1] != 3:
        raise InputError(f"frames of shape {list(frames.shape)}: wanted [frames, height, width, 3]")
    if frames.dtype == np.uint8:
        return frames
    if not np.isfinite(frames).all():
        raise InputError("the video holds NaN or Inf: the model diverged; try float32, or more dense steps")
    return (frames.astype(np.float32).clip(0, 1) * 255).round().astype(np.uint8)


def enlarged(pixels: np.ndarray, minimum: int = MIN_PIXELS) -> np.ndarray:
    """Enlarges by a whole number until the shorter side has `minimum` pixels; smoothed, because the edges of
    large pixels would look like errors of the model."""
    from PIL import Image

    factor = max(1, -(-minimum // min(pixels.shape[-3:-1])))
    if factor == 1:
        return pixels
    size = pixels.shape[-2] * factor, pixels.shape[-3] * factor
    frames = pixels.reshape(-1, *pixels.shape[-3:])
    large = [np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)) for frame in frames]
    return np.stack(large).reshape(*pixels.shape[:-3], size[1], size[0], 3)


def encode_mp4(pixels: np.ndarray, fps: int) -> bytes:
    """H.264 in mp4.  # [T, H, W, 3] uint8"""
    import av

    pixels = np.pad(  # 4:2:0 needs even sides
        pixels, ((0, 0), (0, pixels.shape[1] % 2), (0, pixels.shape[2] % 2), (0, 0)), mode="edge"
    )
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        # A key frame every few frames makes a slider exact and fast.
        stream.options = {"crf": "14", "preset": "medium", "g": "4", "bf": "0"}
        for frame in pixels:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def encode_webp(pixels: np.ndarray, fps: int) -> bytes:
    """An animation that loops forever.  # [T, H, W, 3] uint8"""
    from PIL import Image

    images = [Image.fromarray(frame) for frame in pixels]
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        "WEBP",
        save_all=True,
        append_images=images[1:],
        duration=round(1000 / fps),
        loop=0,
        quality=85,
        method=4,
    )
    return buffer.getvalue()


def encode_png(image: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def difference(video: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, float]:
    """Where two clips differ, in colours scaled to the largest differences.

    Args:
        video: [T, H, W, 3] in [0, 1].
        reference: The same shape.

    Returns:
        Pixels [T, H, W, 3], black where the clips agree, and the difference that is shown white, of values in
        [0, 1]: all but a thousandth of the pixels differ by less. 0 if the clips agree.
    """
    gap = np.abs(video.astype(np.float32) - reference.astype(np.float32)).max(-1)  # [T, H, W]
    top = float(np.percentile(gap, WITHIN_SCALE)) or float(gap.max())
    level = gap / top if top > 0 else gap
    places = [place for place, _ in HEAT]
    channels = [np.interp(level, places, [colour[c] for _, colour in HEAT]) for c in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8), top


def side_by_side(clips: dict[str, np.ndarray], gap: int = 8) -> np.ndarray:
    """Clips next to each other, each under its caption.  # [T, H', W', 3] uint8"""
    columns = [_captioned(pixels, caption, gap) for caption, pixels in clips.items()]
    return np.concatenate(columns, axis=2)


def contact_sheet(clips: dict[str, np.ndarray], columns: int = 8, minimum: int = 128) -> np.ndarray:
    """One row of evenly spaced frames per clip, under its caption.  # [H', W', 3] uint8"""
    rows = []
    for caption, pixels in clips.items():
        chosen = np.linspace(0, len(pixels) - 1, min(columns, len(pixels))).round().astype(int)
        frames = _padded(enlarged(pixels[chosen], minimum), 4)
        row = np.concatenate(list(frames), axis=1)
        rows.append(np.concatenate([_label(caption, row.shape[1]), row]))
    return np.concatenate(rows)


def _captioned(pixels: np.ndarray, caption: str, gap: int) -> np.ndarray:
    framed = _padded(pixels, gap)
    label = np.broadcast_to(_label(caption, framed.shape[2]), (len(framed), LABEL, framed.shape[2], 3))
    return np.concatenate([label, framed], axis=1)


def _padded(pixels: np.ndarray, gap: int) -> np.ndarray:
    """A margin around each frame, half of it on either side."""
    return np.pad(pixels, ((0, 0), (gap // 2,) * 2, (gap // 2,) * 2, (0, 0)), constant_values=PAPER[0])


def _label(text: str, width: int) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, LABEL), PAPER)
    ImageDraw.Draw(image).text((5, 3), text, fill=INK, font=ImageFont.load_default(14))
    return np.asarray(image)
