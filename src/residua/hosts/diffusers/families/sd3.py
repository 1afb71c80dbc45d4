"""Stable Diffusion 3 and 3.5: joint attention over [image, text]; SD3.5 also has attention over the image
alone. Both call torch directly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Family, Grid, Preset, register
from .processor import OwnProcessor, heads_of, normed


class JointProcessor(OwnProcessor):
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,  # diffusers ignores it as well
    ) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v = (heads_of(attn, part(hidden_states)) for part in (attn.to_q, attn.to_k, attn.to_v))
        q, k = normed(attn.norm_q, q), normed(attn.norm_k, k)
        if encoder_hidden_states is None:
            return attn.to_out[1](attn.to_out[0](self.attend(q, k, v)))
        own = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text_q, text_k, text_v = (heads_of(attn, part(encoder_hidden_states)) for part in own)
        text_q, text_k = normed(attn.norm_added_q, text_q), normed(attn.norm_added_k, text_k)
        q, k, v = (torch.cat(both, dim=1) for both in ((q, text_q), (k, text_k), (v, text_v)))
        out = self.attend(q, k, v)  # [B, image + text, H * D]
        image, text = out.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        text = text if attn.context_pre_only else attn.to_add_out(text)
        return attn.to_out[1](attn.to_out[0](image)), text


@register
class SD3(Family):
    name = "SD3.5"
    models = ("SD3Transformer2DModel",)
    attention = r"transformer_blocks\.\d+\.attn2?"
    preset = Preset(0.22, 0.20, 0.03, "not in the paper; an image model, settings as for Wan2.2")
    # Not the fused one: in diffusers it leaves out the norms and the attention over the image alone.
    processors: Mapping[str, Any] = {"JointAttnProcessor2_0": JointProcessor}

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        height, width = inputs["hidden_states"].shape[-2:]
        return 1, height // model.config.patch_size, width // model.config.patch_size

    def depth(self, model: Any, name: str, index: int) -> int:
        """The two attentions of a block are at the same depth."""
        return int(name.split(".")[1])
