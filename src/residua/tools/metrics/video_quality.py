"""How far one video is from another, frame by frame: PSNR, SSIM, GMSD, LPIPS. A metric that cannot be
measured has a reason instead of a number.

Videos are [T, H, W, 3] with values in [0, 1], as pipelines return them: float arrays or tensors, or uint8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from .gmsd import gmsd
from .lpips import Lpips, find_lpips

SSIM_WINDOW, SSIM_SIGMA = 11, 1.5
SSIM_K1, SSIM_K2 = 0.01, 0.03
METRICS = ("psnr", "ssim", "gmsd", "lpips")
FRAMES_AT_ONCE = 8  # bounds the memory of SSIM and LPIPS on long or large videos

__all__ = ["Lpips", "VideoQuality", "find_lpips", "frames_of", "psnr", "quality"]


@dataclass(frozen=True)
class VideoQuality:
    """One video against its reference. If a value is None, `not_measured` has the reason."""

    psnr: float | None  # dB
    ssim: float | None
    gmsd: float | None
    lpips: float | None
    psnr_per_frame: tuple[float | None, ...] = ()  # None: the frame is identical
    not_measured: dict[str, str] = field(default_factory=dict)  # name -> reason

    @classmethod
    def nothing(cls, reason: str) -> VideoQuality:
        return cls(None, None, None, None, not_measured=dict.fromkeys(METRICS, reason))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"psnr_per_frame": list(self.psnr_per_frame)}


def quality(video: Any, reference: Any, lpips: Lpips | str) -> VideoQuality:
    """All metrics that can be computed; `lpips` is a network, or the reason why there is none."""
    pair = _aligned(video, reference)
    missing: dict[str, str] = {}

    def attempt(name: str, metric: Callable[[], float]) -> float | None:
        try:
            value = metric()
        except InputError as error:
            missing[name] = str(error)
            return None
        if math.isinf(value):
            missing[name] = "the videos are identical: no finite value"
            return None
        return value

    if isinstance(lpips, str):
        missing["lpips"] = lpips
    per_frame = map(_decibels, (pair[0] - pair[1]).double().square().mean(dim=(1, 2, 3)))
    return VideoQuality(
        psnr=attempt("psnr", lambda: _psnr(*pair)),
        ssim=attempt("ssim", lambda: _mean_ssim(*pair)),
        gmsd=attempt("gmsd", lambda: _over_frames(gmsd, *pair)),
        lpips=None if isinstance(lpips, str) else attempt("lpips", lambda: _over_frames(lpips, *pair)),
        psnr_per_frame=tuple(None if math.isinf(x) else x for x in per_frame),
        not_measured=missing,
    )


def psnr(video: Any, reference: Any) -> float:
    """Peak signal-to-noise ratio in dB, from the mean squared error of the whole video: never above the mean
    over the frames, and defined even if single frames are identical. Infinite for identical videos."""
    return _psnr(*_aligned(video, reference))


def frames_of(video: Any) -> Tensor:
    """A video [T, H, W, 3] as floats in [0, 1].  # [T, 3, H, W]"""
    frames = video if isinstance(video, Tensor) else torch.from_numpy(np.array(video))
    if frames.ndim != 4 or frames.shape[-1] != 3 or not frames.numel():
        raise InputError(f"video of shape {list(frames.shape)}: wanted [frames, height, width, 3]")
    if frames.dtype == torch.uint8:
        frames = frames.float() / 255
    elif not frames.is_floating_point():
        raise InputError(f"video of {frames.dtype}: wanted floats in [0, 1], or uint8")
    if not bool(torch.isfinite(frames).all()):
        raise InputError("video: NaN or Inf in its frames; nothing can be measured on it")
    return frames.float().clamp(0, 1).permute(0, 3, 1, 2)


def _psnr(x: Tensor, y: Tensor) -> float:
    return _decibels((x - y).double().square().mean())


def _decibels(error: Tensor) -> float:
    return math.inf if float(error) == 0.0 else -10 * math.log10(float(error))


def _mean_ssim(x: Tensor, y: Tensor) -> float:
    """Structural similarity with the standard Gaussian window (11 x 11, sigma 1.5), per channel, over the
    positions where the window fits; mean over channels and frames."""
    if min(x.shape[-2:]) < SSIM_WINDOW:
        raise InputError(f"frames of {x.shape[-1]} x {x.shape[-2]}: SSIM needs {SSIM_WINDOW} x {SSIM_WINDOW} pixels")
    return _over_frames(_ssim, x, y)


def _ssim(x: Tensor, y: Tensor) -> Tensor:
    """[T, 3, H, W] -> [T]. In double precision, because variances are differences of nearly equal numbers."""
    x, y = x.double(), y.double()
    offset = torch.arange(SSIM_WINDOW, dtype=x.dtype, device=x.device) - SSIM_WINDOW // 2
    line = torch.exp(-(offset**2) / (2 * SSIM_SIGMA**2))
    line = (line / line.sum()).expand(x.shape[1], 1, 1, -1)  # [3, 1, 1, 11]

    def blurred(image: Tensor) -> Tensor:
        rows = F.conv2d(image, line, groups=image.shape[1])
        return F.conv2d(rows, line.mT, groups=image.shape[1])

    mean_x, mean_y = blurred(x), blurred(y)
    var_x = blurred(x * x) - mean_x**2
    var_y = blurred(y * y) - mean_y**2
    covariance = blurred(x * y) - mean_x * mean_y
    c1, c2 = SSIM_K1**2, SSIM_K2**2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * covariance + c2) / (var_x + var_y + c2)
    return (luminance * structure).mean(dim=(1, 2, 3))


def _aligned(video: Any, reference: Any) -> tuple[Tensor, Tensor]:
    x, y = frames_of(video), frames_of(reference)
    if x.shape != y.shape:
        got, wanted = ([z.shape[0], *z.shape[2:], 3] for z in (x, y))
        raise InputError(f"videos of {got} and {wanted}: wanted the same frames, height and width")
    return x, y


def _over_frames(metric: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        parts = [metric(*part) for part in zip(x.split(FRAMES_AT_ONCE), y.split(FRAMES_AT_ONCE), strict=True)]
    return float(torch.cat(parts).double().mean())
