"""EasyAnimate: joint attention over [text, video], called through torch directly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Family, Grid, Preset, patched_grid, register
from .processor import OwnProcessor, heads_of, normed, rotate_after


class EasyAnimateProcessor(OwnProcessor):
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,  # the model passes none
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        text = encoder_hidden_states.shape[1]
        shared = attn.add_q_proj is None  # later blocks have one set of projections for both
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1) if shared else hidden_states
        q, k, v = (heads_of(attn, part(x)) for part in (attn.to_q, attn.to_k, attn.to_v))
        q, k = normed(attn.norm_q, q), normed(attn.norm_k, k)
        if not shared:
            own = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            text_q, text_k, text_v = (heads_of(attn, part(encoder_hidden_states)) for part in own)
            text_q, text_k = normed(attn.norm_added_q, text_q), normed(attn.norm_added_k, text_k)
            q, k, v = (torch.cat(both, dim=1) for both in ((text_q, q), (text_k, k), (text_v, v)))
        if image_rotary_emb is not None:
            q, k = rotate_after(q, text, image_rotary_emb), rotate_after(k, text, image_rotary_emb)
        out = self.attend(q, k, v)  # [B, text + video, H * D]
        text_out = out[:, :text] if shared else attn.to_add_out(out[:, :text])
        return attn.to_out[1](attn.to_out[0](out[:, text:])), text_out


@register
class EasyAnimate(Family):
    name = "EasyAnimate"
    models = ("EasyAnimateTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    preset = Preset(0.22, 0.20, 0.03, "not in the paper; taken over from Wan2.2")
    processors: Mapping[str, Any] = {"EasyAnimateAttnProcessor2_0": EasyAnimateProcessor}

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return patched_grid(inputs["hidden_states"], (1, model.config.patch_size, model.config.patch_size))

    def video_start(self, queries: int, keys: int, video: int) -> tuple[int, int]:
        return queries - video, keys - video
