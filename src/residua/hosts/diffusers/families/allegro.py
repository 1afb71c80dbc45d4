"""Allegro: the whole sequence is video. Its processor calls torch directly."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .base import Family, register
from .processor import OwnProcessor


class AllegroProcessor(OwnProcessor):
    def key_mask(self, mask: Any) -> Tensor | None:
        # The model passes a bias [B, 1, N]: zero for valid tokens, -10000 for the others.
        return None if mask is None else (mask == 0)[:, None]

    def rotate(self, x: Tensor, rotary: Any) -> Tensor:
        from diffusers.models.embeddings import apply_rotary_emb_allegro

        rotated: Tensor = apply_rotary_emb_allegro(x.transpose(1, 2), *rotary)
        return rotated.transpose(1, 2)


@register
class Allegro(Family):
    name = "Allegro"
    models = ("AllegroTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    processors: Mapping[str, Any] = {"AllegroAttnProcessor2_0": AllegroProcessor}
