"""Mochi: joint attention over [video, valid text]. diffusers loops over the batch and gathers the valid text;
here it is one call with a key mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Family, Grid, Preset, patched_grid, register
from .processor import OwnProcessor, heads_of, joint_key_mask, normed


class MochiProcessor(OwnProcessor):
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        video, text = hidden_states, encoder_hidden_states
        q = normed(attn.norm_q, heads_of(attn, attn.to_q(video)))  # [B, video, H, D]
        k = normed(attn.norm_k, heads_of(attn, attn.to_k(video)))
        if image_rotary_emb is not None:
            q, k = _rotate(q, *image_rotary_emb), _rotate(k, *image_rotary_emb)
        text_q = normed(attn.norm_added_q, heads_of(attn, attn.add_q_proj(text)))  # [B, text, H, D]
        text_k = normed(attn.norm_added_k, heads_of(attn, attn.add_k_proj(text)))
        q, k = torch.cat([q, text_q], dim=1), torch.cat([k, text_k], dim=1)
        v = torch.cat([heads_of(attn, attn.to_v(video)), heads_of(attn, attn.add_v_proj(text))], dim=1)
        out = self.attend(q, k, v, joint_key_mask(attention_mask, video.shape[1]))
        video, text = out.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        text = text * attention_mask.bool()[..., None]  # diffusers leaves zeros at padded text
        # The last block has no text output.
        text = attn.to_add_out(text) if hasattr(attn, "to_add_out") else text
        return attn.to_out[1](attn.to_out[0](video)), text


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.to(x.dtype).flatten(-2)


@register
class Mochi(Family):
    name = "Mochi"
    models = ("MochiTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    preset = Preset(0.22, 0.20, 0.03, "not in the paper; taken over from Wan2.2")
    processors: Mapping[str, Any] = {"MochiAttnProcessor2_0": MochiProcessor}
    dense_per_sample = True  # as in diffusers, so that backends without mask support work

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return patched_grid(inputs["hidden_states"], (1, model.config.patch_size, model.config.patch_size))
