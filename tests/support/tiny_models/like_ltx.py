"""The LTX models."""

from typing import Any

import diffusers
import torch

from .common import FRAMES, HEIGHT, VIDEO, WIDTH, Built, noise


def ltx(heads: int = 2) -> Built:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=heads,
        attention_head_dim=16,
        cross_attention_dim=16 * heads,
        num_layers=2,
        caption_channels=16,
    )
    return model, {
        "hidden_states": noise(2, VIDEO, 8),
        "encoder_hidden_states": noise(2, 6, 16),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": torch.ones(2, 6),
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "rope_interpolation_scale": (1.0, 32.0, 32.0),
    }


def ltx2(**more: Any) -> Built:
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        qk_norm="rms_norm_across_heads",
        caption_channels=16,
        rope_double_precision=False,
        **more,
    )
    return model, {
        "hidden_states": noise(1, VIDEO, 4),
        "audio_hidden_states": noise(1, 9, 4),
        "encoder_hidden_states": noise(1, 6, 16),
        "audio_encoder_hidden_states": noise(1, 6, 16),
        "timestep": torch.full((1, 1), 500.0),
        "encoder_attention_mask": torch.ones(1, 6),
        "audio_encoder_attention_mask": torch.ones(1, 6),
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "fps": 25.0,
        "audio_num_frames": 9,
    }


def ltx23(**more: Any) -> Built:
    """LTX-2.3: gated attention, a modulated cross-attention, and blocks that can be perturbed."""
    model, inputs = ltx2(
        gated_attn=True,
        audio_gated_attn=True,
        cross_attn_mod=True,
        audio_cross_attn_mod=True,
        perturbed_attn=True,
        **more,
    )
    return model, {**inputs, "sigma": torch.tensor([500.0])}


def ltx25() -> Built:
    """LTX-2.5: LTX-2.3 whose cross-attention does not know the timestep."""
    return ltx23(use_prompt_adaln_single=False, ff_bias=False, audio_ff_bias=False)
