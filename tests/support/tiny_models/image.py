"""Models of pictures: the grid is 12 x 16."""

import diffusers
import torch

from .common import VIDEO, Built, noise


def places(tokens: int, axes: int) -> torch.Tensor:
    ids = torch.zeros(tokens, axes)
    ids[:, 1], ids[:, 2] = torch.arange(tokens) // 16, torch.arange(tokens) % 16
    return ids


def flux() -> Built:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )
    return model, {
        "hidden_states": noise(1, VIDEO, 4),
        "encoder_hidden_states": noise(1, 8, 16),
        "pooled_projections": noise(1, 8),
        "timestep": torch.tensor([0.5]),
        "img_ids": places(VIDEO, 3),
        "txt_ids": torch.zeros(8, 3),
    }


def flux2() -> Built:
    model = diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )
    return model, {
        "hidden_states": noise(1, VIDEO, 4),
        "encoder_hidden_states": noise(1, 8, 16),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([1.0]),
        "img_ids": places(VIDEO, 4)[None],
        "txt_ids": torch.zeros(1, 8, 4),
    }


def qwen_image() -> Built:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    inputs = {
        "hidden_states": noise(1, VIDEO, 16),
        "encoder_hidden_states": noise(1, 8, 16),
        "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]).bool(),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 12, 16)]],
    }
    if diffusers.__version__.startswith("0.36."):  # does not read the length of the text from its mask
        inputs["txt_seq_lens"] = [8]
    return model, inputs


def z_image() -> Built:
    """Two prompts of different length, each filled up to 32 tokens or 64."""
    model = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    )
    return model, {
        "x": [noise(4, 1, 24, 32), noise(4, 1, 24, 32) + 1],
        "t": torch.tensor([0.5, 0.5]),
        "cap_feats": [noise(5, 16), noise(40, 16)],
    }


def sd3() -> Built:
    model = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return model, {
        "hidden_states": noise(1, 4, 24, 32),
        "encoder_hidden_states": noise(1, 8, 16),
        "pooled_projections": noise(1, 8),
        "timestep": torch.tensor([500]),
    }
