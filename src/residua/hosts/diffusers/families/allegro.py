"""Allegro: the whole sequence is video. Its processor calls torch directly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .base import Family, Grid, Preset, patched_grid, register
from .processor import OwnProcessor, heads_of


class AllegroProcessor(OwnProcessor):
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:
        q, k, v = (heads_of(attn, part(hidden_states)) for part in (attn.to_q, attn.to_k, attn.to_v))
        if image_rotary_emb is not None:
            q, k = _rotate(q, image_rotary_emb), _rotate(k, image_rotary_emb)
        # The model passes a bias [B, 1, N]: zero for valid tokens, -10000 for the others.
        mask = None if attention_mask is None else (attention_mask == 0)[:, None]
        return attn.to_out[1](attn.to_out[0](self.attend(q, k, v, mask)))


def _rotate(x: Tensor, rotary: Any) -> Tensor:
    """[B, N, H, D] -> [B, N, H, D]."""
    from diffusers.models.embeddings import apply_rotary_emb_allegro

    turned: Tensor = apply_rotary_emb_allegro(x.transpose(1, 2), *rotary)
    return turned.transpose(1, 2)


@register
class Allegro(Family):
    name = "Allegro"
    models = ("AllegroTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    preset = Preset(0.22, 0.20, 0.03, "not in the paper; taken over from Wan2.2")
    processors: Mapping[str, Any] = {"AllegroAttnProcessor2_0": AllegroProcessor}

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        config = model.config
        return patched_grid(inputs["hidden_states"], (config.patch_size_t, config.patch_size, config.patch_size))
