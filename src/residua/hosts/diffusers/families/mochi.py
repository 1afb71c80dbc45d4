"""Mochi: joint attention over [video, valid text]. diffusers loops over the batch and gathers the valid text;
here it is one call with a key mask."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Family, register
from .processor import OwnProcessor, project_out


class MochiProcessor(OwnProcessor):
    def compute(self, attn: Any, video: Tensor, text: Tensor, mask: Any, rotary: Any) -> tuple[Tensor, Tensor]:
        video, text = self.attend_joint(attn, video, text, rotary, mask)
        text = text * mask.bool()[..., None]  # diffusers leaves zeros at padded text
        # The last block has no text output.
        return project_out(attn, video), attn.to_add_out(text) if hasattr(attn, "to_add_out") else text

    def rotate(self, x: Tensor, rotary: Any) -> Tensor:
        cos, sin = rotary
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return rotated.to(x.dtype).flatten(-2)


@register
class Mochi(Family):
    name = "Mochi"
    models = ("MochiTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    processors: Mapping[str, Any] = {"MochiAttnProcessor2_0": MochiProcessor}
    dense_per_sample = True  # as in diffusers, so that backends without mask support work
