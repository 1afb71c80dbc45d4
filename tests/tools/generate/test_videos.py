"""What is encoded can be decoded again."""

import io

import av
import numpy as np
import pytest
from PIL import Image

from residua.errors import InputError
from residua.tools.generate import videos


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


def test_small_clips_are_enlarged_smoothly():
    pixels = gradient(2, 16, 24)
    large = videos.enlarged(pixels, 64)
    assert large.shape == (2, 64, 96, 3) and large.dtype == np.uint8
    means = large.reshape(2, 16, 4, 24, 4, 3).mean((2, 4))
    assert np.abs(means - pixels).max() < 3  # every pixel stands where it stood
    steps = np.abs(np.diff(large[0, 32, 8:-8].astype(int), axis=0))
    assert steps.max() < np.abs(np.diff(pixels[0, 8].astype(int), axis=0)).max()  # and no blocks
    np.testing.assert_array_equal(videos.enlarged(pixels, 8), pixels)
    assert videos.enlarged(pixels[0], 64).shape == (64, 96, 3)


def test_side_by_side_and_contact_sheet_show_every_clip():
    pixels = gradient(10, 64, 64)
    pair = videos.side_by_side({"dense": pixels, "sparse": pixels}, gap=8)
    assert pair.shape == (10, 22 + 72, 144, 3)
    np.testing.assert_array_equal(pair[:, 26:90, 4:68], pixels)
    sheet = videos.contact_sheet({"dense": pixels, "sparse": pixels}, columns=4, minimum=64)
    assert sheet.shape == (2 * (22 + 68), 4 * 68, 3)
    Image.open(io.BytesIO(videos.encode_png(sheet))).verify()


def test_the_difference_is_scaled_to_what_is_there():
    clip = gradient() / np.float32(255)
    same, top = videos.difference(clip, clip)
    assert top == 0 and (same == videos.HEAT[0][1]).all()
    for size in (0.5, 0.001):
        other = clip.copy()
        other[1, :16] += size
        other[2, :16] += size / 2
        heat, top = videos.difference(other, clip)
        assert top == pytest.approx(size, rel=1e-3)
        assert heat.shape == clip.shape and (heat[1, :16] > 250).all() and (heat[0] == same[0]).all()
        assert (heat[2, :16] < heat[1, :16]).all() and (heat[2, :16] > same[2, :16]).all()


def test_one_odd_pixel_does_not_decide_the_scale():
    clip = np.zeros((4, 64, 64, 3), np.float32)
    other = clip + 0.01
    other[0, 0, 0] = 1.0
    _, top = videos.difference(other, clip)
    assert top == pytest.approx(0.01, rel=1e-3)
