"""HunyuanVideo and the models built like it."""

import diffusers
import torch

from .common import FRAMES, Built, latents, noise


def hunyuan(condition: str | None = None, layers: int = 1, single: int = 1, channels: int = 4) -> Built:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=channels,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=layers,
        num_single_layers=single,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
        image_condition_type=condition,
    )
    return model, {
        "hidden_states": latents(1, channels),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, 8, 16),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]),
        "pooled_projections": noise(1, 8),
        "guidance": torch.tensor([6000.0]),
    }


def hunyuan15() -> Built:
    model = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=16,
        text_embed_2_dim=8,
        image_embed_dim=12,
        rope_axes_dim=(4, 6, 6),
        target_size=16,
        task_type="t2v",
    )
    return model, {
        "hidden_states": latents(1, 4, patch=1),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": noise(1, 6, 16),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "encoder_hidden_states_2": noise(1, 4, 8),
        "encoder_attention_mask_2": torch.tensor([[1, 1, 0, 0]]),
        "image_embeds": torch.zeros(1, 3, 12),
    }


def motif() -> Built:
    model = diffusers.MotifVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        patch_size=2,
        patch_size_t=1,
        text_embed_dim=16,
        rope_axes_dim=(2, 4, 4),
    )
    given = hunyuan()[1]
    kept = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask")
    return model, {name: given[name] for name in kept}


def framepack() -> Built:
    model = diffusers.HunyuanVideoFramepackTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
        has_image_proj=True,
        image_proj_dim=16,
        has_clean_x_embedder=True,
    )
    return model, {
        **hunyuan()[1],
        "image_embeds": noise(1, 3, 16),
        "indices_latents": torch.arange(FRAMES),
        "latents_clean": latents(1, 4, frames=2),
        "indices_latents_clean": torch.arange(2),
        "latents_history_2x": latents(1, 4, frames=2),
        "indices_latents_history_2x": torch.arange(2),
        "latents_history_4x": latents(1, 4, frames=16),
        "indices_latents_history_4x": torch.arange(16),
    }
