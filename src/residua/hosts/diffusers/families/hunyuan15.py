"""HunyuanVideo-1.5: joint attention over [video, text]. The processor of diffusers builds an N x N mask (12.5
GB per call at 111,600 tokens); ours passes only the key padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Preset, register
from .hunyuan import HunyuanVideo
from .processor import OwnProcessor, heads_of, joint_key_mask


class HunyuanVideo15Processor(OwnProcessor):
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        from diffusers.models.embeddings import apply_rotary_emb

        video, text = hidden_states, encoder_hidden_states
        q = attn.norm_q(heads_of(attn, attn.to_q(video)))  # [B, video, H, D]
        k = attn.norm_k(heads_of(attn, attn.to_k(video)))
        if image_rotary_emb is not None:
            q = apply_rotary_emb(q, image_rotary_emb, sequence_dim=1)
            k = apply_rotary_emb(k, image_rotary_emb, sequence_dim=1)
        text_q = heads_of(attn, attn.add_q_proj(text))  # [B, text, H, D]
        text_k = heads_of(attn, attn.add_k_proj(text))
        text_q = text_q if attn.norm_added_q is None else attn.norm_added_q(text_q)
        text_k = text_k if attn.norm_added_k is None else attn.norm_added_k(text_k)
        q, k = torch.cat([q, text_q], dim=1), torch.cat([k, text_k], dim=1)
        v = torch.cat([heads_of(attn, attn.to_v(video)), heads_of(attn, attn.add_v_proj(text))], dim=1)
        # The mask of diffusers also zeroes the rows of padded text. Nothing reads those rows, because their
        # keys are masked.
        mask = joint_key_mask(attention_mask, q.shape[1] - attention_mask.shape[1])
        out = self.attend(q, k, v, mask)  # [B, video + text, H * D]
        video, text = out.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](video)), attn.to_add_out(text)


@register
class HunyuanVideo15(HunyuanVideo):
    name = "HunyuanVideo-1.5"
    models = ("HunyuanVideo15Transformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn"
    preset = Preset(0.22, 0.10, 1, "not in the paper; taken over from HunyuanVideo")
    processors: Mapping[str, Any] = {"HunyuanVideo15AttnProcessor2_0": HunyuanVideo15Processor}
