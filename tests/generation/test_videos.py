"""What is encoded can be decoded again."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from PIL import Image

from residua.errors import InputError
from residua.generation import videos


def gradient(frames: int = 5, height: int = 32, width: int = 48) -> np.ndarray:
    t, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    return np.stack([20 * t + x, 4 * y, 255 - 4 * x], axis=-1).clip(0, 255).astype(np.uint8)


def decoded(content: bytes) -> np.ndarray:
    with av.open(io.BytesIO(content)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_mp4_keeps_every_frame_in_order():
    pixels = gradient()
    again = decoded(videos.encode_mp4(pixels, 12))
    assert again.shape == pixels.shape
    assert np.abs(again.astype(int) - pixels).mean() < 4


def test_mp4_of_odd_sizes_and_of_one_frame():
    assert decoded(videos.encode_mp4(gradient(1, 17, 15), 8)).shape == (1, 18, 16, 3)


def test_webp_is_an_endless_animation():
    pixels = gradient()
    image = Image.open(io.BytesIO(videos.encode_webp(pixels, 10)))
    assert image.n_frames == len(pixels) and image.info["loop"] == 0
    assert np.abs(np.asarray(image.convert("RGB")).astype(int) - pixels[0]).mean() < 6


def test_frames_of_a_pipeline_become_pixels():
    floats = gradient() / np.float32(255)
    np.testing.assert_array_equal(videos.to_pixels(floats), gradient())
    np.testing.assert_array_equal(videos.to_pixels([Image.fromarray(f) for f in gradient()]), gradient())
    assert videos.to_pixels(np.full((1, 2, 2, 3), 1.7)).max() == 255
    with pytest.raises(InputError, match="NaN or Inf"):
        videos.to_pixels(np.full((1, 2, 2, 3), np.nan))
    with pytest.raises(InputError, match="wanted"):
        videos.to_pixels(np.zeros((1, 2, 2, 4)))


def test_small_clips_are_enlarged_by_whole_pixels():
    pixels = gradient(2, 16, 24)
    large = videos.enlarged(pixels, 64)
    assert large.shape == (2, 64, 96, 3)
    np.testing.assert_array_equal(large[:, ::4, ::4], pixels)
    np.testing.assert_array_equal(videos.enlarged(pixels, 8), pixels)


def test_side_by_side_and_contact_sheet_show_every_clip():
    pixels = gradient(10, 64, 64)
    pair = videos.side_by_side({"dense": pixels, "sparse": pixels}, gap=8)
    assert pair.shape == (10, 22 + 72, 144, 3)
    np.testing.assert_array_equal(pair[:, 26:90, 4:68], pixels)
    sheet = videos.contact_sheet({"dense": pixels, "sparse": pixels}, columns=4, least=64)
    assert sheet.shape == (2 * (22 + 68), 4 * 68, 3)
    Image.open(io.BytesIO(videos.encode_png(sheet))).verify()


def test_difference_is_black_where_clips_agree():
    pixels = gradient()
    assert videos.difference(pixels, pixels).max() == 0
    assert videos.difference(pixels[:1] * 0 + 10, pixels[:1] * 0, gain=4).min() == 40
