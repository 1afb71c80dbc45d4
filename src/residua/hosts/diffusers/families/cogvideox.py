"""CogVideoX: joint attention over [text, video], called through torch directly. Both guidance branches
come as one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....errors import IntegrationError
from .base import Family, Grid, Preset, register
from .processor import OwnProcessor, heads_of, normed, rotate_after


class CogVideoXProcessor(OwnProcessor):
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        if attention_mask is not None:
            raise IntegrationError("CogVideoX: got an attention mask, wanted none; remove Residua for this call")
        text = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        q, k, v = (heads_of(attn, part) for part in self.project(attn, x))  # [B, text + video, H, D]
        q, k = normed(attn.norm_q, q), normed(attn.norm_k, k)
        if image_rotary_emb is not None:
            q, k = rotate_after(q, text, image_rotary_emb), rotate_after(k, text, image_rotary_emb)
        out = attn.to_out[1](attn.to_out[0](self.attend(q, k, v)))
        return out[:, text:], out[:, :text]

    def project(self, attn: Any, x: Tensor) -> tuple[Tensor, ...]:
        return attn.to_q(x), attn.to_k(x), attn.to_v(x)


class FusedCogVideoXProcessor(CogVideoXProcessor):
    def project(self, attn: Any, x: Tensor) -> tuple[Tensor, ...]:
        return attn.to_qkv(x).chunk(3, dim=-1)


@register
class CogVideoX(Family):
    name = "CogVideoX"
    models = ("CogVideoXTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    preset = Preset(0.22, 0.20, 0.03, "not in the paper; taken over from Wan2.2")
    processors: Mapping[str, Any] = {
        "CogVideoXAttnProcessor2_0": CogVideoXProcessor,
        "FusedCogVideoXAttnProcessor2_0": FusedCogVideoXProcessor,
    }

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        _, frames, _, height, width = inputs["hidden_states"].shape
        patch, patch_t = model.config.patch_size, model.config.patch_size_t or 1
        return frames // patch_t, height // patch, width // patch

    def video_start(self, queries: int, keys: int, video: int) -> tuple[int, int]:
        return queries - video, keys - video


@register
class ConsisID(CogVideoX):
    """CogVideoX with a face: its cross-attention to the face is not changed."""

    name = "ConsisID"
    models = ("ConsisIDTransformer3DModel",)

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        _, frames, _, height, width = inputs["hidden_states"].shape
        return frames, height // model.config.patch_size, width // model.config.patch_size
