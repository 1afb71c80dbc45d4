"""CogVideoX: joint attention over [text, video], called through torch directly. Both guidance branches
come as one batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....errors import IntegrationError
from .base import Family, Grid, patch_of, patched_grid, register
from .processor import OwnProcessor, project_out


class CogVideoXProcessor(OwnProcessor):
    def compute(self, attn: Any, video: Tensor, text: Tensor, mask: Any, rotary: Any) -> tuple[Tensor, Tensor]:
        if mask is not None:
            raise IntegrationError("CogVideoX: got an attention mask, wanted none; remove Residua for this call")
        first = text.shape[1]
        q, k, v = self.project(attn, torch.cat([text, video], dim=1), rotary, first)
        out = project_out(attn, self.attend(q, k, v))
        return out[:, first:], out[:, :first]


class FusedCogVideoXProcessor(CogVideoXProcessor):
    def linear(self, attn: Any, x: Tensor) -> tuple[Tensor, ...]:
        return attn.to_qkv(x).chunk(3, dim=-1)


@register
class CogVideoX(Family):
    name = "CogVideoX"
    models = ("CogVideoXTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    processors: Mapping[str, Any] = {
        "CogVideoXAttnProcessor2_0": CogVideoXProcessor,
        "FusedCogVideoXAttnProcessor2_0": FusedCogVideoXProcessor,
    }
    text_first = True

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return patched_grid(inputs["hidden_states"].transpose(1, 2), patch_of(model))


@register
class ConsisID(CogVideoX):
    """CogVideoX with a face: its cross-attention to the face is not changed."""

    name = "ConsisID"
    models = ("ConsisIDTransformer3DModel",)
