"""The noise floor: how far two dense runs of one prompt and seed are apart if attention sums in another order.

The result of attention does not depend on the order of its keys, but its rounding does, and a denoising loop
amplifies small differences: on real bf16 models two dense runs (another kernel, another split) differ by 20
to 35 dB. A sparse video that is as close to the dense one as the noise floor cannot be told from a second
dense run, so a PSNR above it means nothing more.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...hosts.diffusers import accelerate
from ..capture.recording import dense_on_purpose
from ..metrics.video_quality import VideoQuality

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


def noise_floor_text(noise_floor: VideoQuality, metric: str = "psnr", form: str = "{:.1f} dB") -> str | None:
    """The noise floor of a metric as text; None where it was not measured."""
    value = getattr(noise_floor, metric)
    if value is not None:
        return form.format(value)
    return "identical" if "identical" in noise_floor.not_measured.get(metric, "") else None


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
