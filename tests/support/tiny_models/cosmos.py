"""Cosmos-Predict2.5 and Cosmos3."""

import diffusers
import torch

from .common import FRAMES, HEIGHT, VIDEO, WIDTH, Built, latents, noise


def cosmos25(layers: int = 2) -> Built:
    # The real checkpoint has concat_padding_mask=True, which needs torchvision.
    model = diffusers.CosmosTransformer3DModel(
        in_channels=17,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=layers,
        mlp_ratio=2,
        text_embed_dim=32,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        rope_scale=(1.0, 3.0, 3.0),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=64,
        encoder_hidden_states_channels=32,
    )
    return model, {
        "hidden_states": latents(1, 16),
        "condition_mask": torch.zeros(1, 1, FRAMES, 2 * HEIGHT, 2 * WIDTH),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": noise(1, 12, 64),
        "padding_mask": torch.zeros(1, 1, 64, 64),
    }


def cosmos3(text: int = 7, channels: int = 4) -> Built:
    model = diffusers.Cosmos3OmniTransformer(
        head_dim=16,
        hidden_size=32,
        intermediate_size=64,
        latent_channel=channels,
        latent_patch_size=2,
        num_attention_heads=4,
        num_hidden_layers=2,
        num_key_value_heads=2,
        patch_latent_dim=4 * channels,
        vocab_size=64,
        rope_scaling={"mrope_section": [4, 2, 2]},
    )
    video = torch.arange(text, text + VIDEO)
    return model, {
        "input_ids": torch.arange(text),
        "text_indexes": torch.arange(text),
        "position_ids": torch.arange(text + VIDEO)[None].expand(3, -1).float(),
        "und_len": text,
        "sequence_length": text + VIDEO,
        "vision_tokens": [latents(1, channels)],
        "vision_token_shapes": [(FRAMES, HEIGHT, WIDTH)],
        "vision_sequence_indexes": video,
        "vision_mse_loss_indexes": video,
        "vision_timesteps": torch.full((VIDEO,), 500.0),
        "vision_noisy_frame_indexes": [torch.arange(FRAMES)],
    }
