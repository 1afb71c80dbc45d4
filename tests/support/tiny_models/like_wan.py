"""Wan and the models built like it."""

import diffusers
import torch

from .common import FRAMES, VIDEO, Built, latents, noise


def wan(
    image: bool = False,
    tokens_timestep: bool = False,
    heads: int = 2,
    layers: int = 2,
    batch: int = 1,
    channels: int = 16,
) -> Built:
    channels = 36 if image else channels
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=16,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    timestep = torch.full((batch, VIDEO), 500) if tokens_timestep else torch.full((batch,), 500)
    text = noise(batch, 12, 16)
    return model, {"hidden_states": latents(batch, channels), "timestep": timestep, "encoder_hidden_states": text}


def wan_vace(control: int = 48) -> Built:
    model = diffusers.WanVACETransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=3,
        rope_max_seq_len=32,
        vace_layers=[0, 2],
        vace_in_channels=control,
    )
    return model, {
        "hidden_states": latents(1, 16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, 12, 16),
        "control_hidden_states": latents(1, control),
    }


def skyreels() -> Built:
    model = diffusers.SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return model, wan()[1]


def chronoedit() -> Built:
    model = diffusers.ChronoEditTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        rope_temporal_skip_len=8,
    )
    return model, wan()[1]


def wan_animate() -> Built:
    model = diffusers.WanAnimateTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=12, latent_channels=4,
        out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2, image_dim=16, rope_max_seq_len=32,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16}, motion_encoder_size=16, motion_style_dim=8,
        motion_dim=4, motion_encoder_dim=16, face_encoder_hidden_dim=16, face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 12),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, 12, 16),
        "encoder_hidden_states_image": noise(1, 5, 16),
        "pose_hidden_states": latents(1, 4, frames=FRAMES - 1),
        "face_pixel_values": noise(1, 3, 5, 16, 16),
    }


def helios() -> Built:
    """One frame of recent history, two of the middle, four old ones: 64 + 16 + 4 tokens."""
    model = diffusers.HeliosTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_dim=(4, 4, 4),
        is_amplify_history=True,
    )
    return model, {
        "hidden_states": latents(1, 4),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, 12, 16),
        "indices_hidden_states": torch.arange(7, 7 + FRAMES)[None],
        "latents_history_long": latents(1, 4, frames=4),
        "latents_history_mid": latents(1, 4, frames=2),
        "latents_history_short": latents(1, 4, frames=1),
        "indices_latents_history_long": torch.arange(4)[None],
        "indices_latents_history_mid": torch.arange(4, 6)[None],
        "indices_latents_history_short": torch.arange(6, 7)[None],
    }


def anyflow() -> Built:
    model = diffusers.AnyFlowTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    times = {"timestep": torch.full((1, FRAMES), 500.0), "r_timestep": torch.full((1, FRAMES), 250.0)}
    return model, {"hidden_states": latents(1, 16).transpose(1, 2), "encoder_hidden_states": noise(1, 12, 16), **times}
