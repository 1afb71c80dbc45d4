"""Cosmos-Predict2.5 (and Cosmos 1 and 2, which share its transformer): the whole sequence is video. The
processor of diffusers passes no backend, so Residua has its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .base import Family, Grid, Preset, patched_grid, register
from .processor import OwnProcessor, heads_of


class CosmosProcessor(OwnProcessor):
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:
        from diffusers.models.embeddings import apply_rotary_emb

        # The rotary embedding expects [B, H, N, D].
        q = attn.norm_q(heads_of(attn, attn.to_q(hidden_states)).transpose(1, 2))
        k = attn.norm_k(heads_of(attn, attn.to_k(hidden_states)).transpose(1, 2))
        v = heads_of(attn, attn.to_v(hidden_states))  # [B, N, H, D]
        if image_rotary_emb is not None:
            q = apply_rotary_emb(q, image_rotary_emb, use_real=True, use_real_unbind_dim=-2)
            k = apply_rotary_emb(k, image_rotary_emb, use_real=True, use_real_unbind_dim=-2)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v)  # [B, N, H * D]
        return attn.to_out[1](attn.to_out[0](out))


@register
class Cosmos25(Family):
    name = "Cosmos-Predict2.5"
    models = ("CosmosTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    preset = Preset(0.22, 2, 1, "the paper's density; the authors' dense steps and layers")
    processors: Mapping[str, Any] = {"CosmosAttnProcessor2_0": CosmosProcessor}

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return patched_grid(inputs["hidden_states"], tuple(model.config.patch_size))


@register
class CosmosControl(Cosmos25):
    """The ControlNet of Cosmos-Transfer2.5: its blocks are those of the transformer."""

    name = "Cosmos-Transfer2.5 ControlNet"
    models = ("CosmosControlNetModel",)
    attention = r"control_blocks\.\d+\.attn1"
    preset = Preset(0.22, 2, 1, "not in the paper; taken over from Cosmos-Predict2.5")

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return patched_grid(inputs["latents"], tuple(model.config.patch_size))
