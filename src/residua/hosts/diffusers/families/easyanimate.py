"""EasyAnimate: joint attention over [text, video], called through torch directly."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Family, register
from .processor import OwnProcessor, project_out, project_text


class EasyAnimateProcessor(OwnProcessor):
    def compute(self, attn: Any, video: Tensor, text: Tensor, mask: Any, rotary: Any) -> tuple[Tensor, Tensor]:
        """The model passes no mask."""
        first = text.shape[1]
        if attn.add_q_proj is None:  # later blocks have one set of projections for both
            q, k, v = self.project(attn, torch.cat([text, video], dim=1), rotary, first)
        else:
            both = zip(project_text(attn, text), self.project(attn, video, rotary), strict=True)
            q, k, v = (torch.cat(pair, dim=1) for pair in both)
        out = self.attend(q, k, v)  # [B, text + video, H * D]
        text_out = out[:, :first] if attn.add_q_proj is None else attn.to_add_out(out[:, :first])
        return project_out(attn, out[:, first:]), text_out


@register
class EasyAnimate(Family):
    name = "EasyAnimate"
    models = ("EasyAnimateTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    processors: Mapping[str, Any] = {"EasyAnimateAttnProcessor2_0": EasyAnimateProcessor}
    text_first = True
