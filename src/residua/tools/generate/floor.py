"""The floor: how far two dense runs of one prompt and seed are apart if attention sums in another order.

The result of attention does not depend on the order of its keys, but its rounding does, and a denoising loop
amplifies small differences: on real bf16 models two dense runs (another kernel, another split) differ by 20
to 35 dB. A sparse video that is as close to the dense one as the floor cannot be told from a second dense
run, so a PSNR above the floor means nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from ...hosts.diffusers import accelerate
from ..capture.recording import dense_on_purpose
from ..metrics.video_quality import Lpips, VideoQuality, quality
from .run import Clip, Progress, Request, generate

NAME = "dense again"  # in progress bars and tables
MEANING = "dense against dense, its attention summed in another order"

Dispatch = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "float | None", bool], Tensor]


@contextmanager
def another_order(pipe: Any) -> Iterator[None]:
    """Inside this block a pipeline runs dense, with the same kernel as without it, but the keys of every
    self-attention call are rolled by half their number. Causal calls are not changed.

    Args:
        pipe: The pipeline, not accelerated.
    """
    with dense_on_purpose(), accelerate(pipe, dense_steps=0, dense_layers=1.0, min_tokens=0) as handle:
        for attachment in handle.attachments:
            for layer in attachment.layers:
                layer.dispatch = _rolled(layer.dispatch)  # type: ignore[method-assign, assignment]
        yield


def dense_again(pipe: Any, request: Request, progress: Progress | None = None) -> Clip:
    """The dense clip of a request, with attention summed in another order.

    Args:
        pipe: The pipeline, not accelerated.
        request: What to generate.
        progress: Called after every step.

    Returns:
        The clip and its time.
    """
    with another_order(pipe):
        return generate(pipe, request, progress)


def measure_floor(
    pipe: Any, request: Request, dense: np.ndarray, lpips: Lpips | str, progress: Progress | None = None
) -> VideoQuality:
    """Runs dense once more and compares with the first run.

    Args:
        pipe: The pipeline, not accelerated.
        request: What `dense` was generated from.
        dense: Frames of the first run, [T, H, W, 3] in [0, 1].
        lpips: A network, or the reason why there is none.
        progress: Called with every step.

    Returns:
        PSNR, SSIM and LPIPS of the second run against the first. Runs that do not differ in a single bit have
        no PSNR; `not_measured` says so.
    """
    return quality(dense_again(pipe, request, progress).frames, dense, lpips)


def floor_text(floor: VideoQuality, metric: str = "psnr", form: str = "{:.1f} dB") -> str | None:
    """The floor of a metric as text; None where it was not measured."""
    value = getattr(floor, metric)
    if value is not None:
        return form.format(value)
    return "identical" if "identical" in floor.not_measured.get(metric, "") else None


def _rolled(dispatch: Dispatch) -> Dispatch:
    def rolled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool) -> Tensor:
        """k and v are [B, Nk, Hkv, D]; a mask ends in Nk, or in 1 if it is the same for all keys."""
        keys = k.shape[1]
        if causal:
            return dispatch(q, k, v, mask, scale, causal)
        if mask is not None and mask.shape[-1] == keys:
            mask = mask.roll(keys // 2, -1)
        return dispatch(q, k.roll(keys // 2, 1), v.roll(keys // 2, 1), mask, scale, causal)

    return rolled
