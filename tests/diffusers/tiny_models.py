"""Tiny random transformers of every supported family, with inputs for one forward pass; offline,
milliseconds each.

Every model sees a grid of 3 x 8 x 8 video tokens (192).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

FRAMES, HEIGHT, WIDTH = 3, 8, 8
VIDEO = FRAMES * HEIGHT * WIDTH
QK = ("to_q.", "to_k.", "to_query.", "to_key.", "q_proj", "k_proj")  # in names of weights
Built = tuple[Any, dict[str, Any]]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def latents(batch: int, channels: int, patch: int = 2, frames: int = FRAMES) -> torch.Tensor:
    return noise(batch, channels, frames, HEIGHT * patch, WIDTH * patch)


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
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=12,
        in_channels=channels, out_channels=16, text_dim=16, freq_dim=32, ffn_dim=32,
        num_layers=layers, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    timestep = torch.full((batch, VIDEO), 500) if tokens_timestep else torch.full((batch,), 500)
    text = noise(batch, 12, 16)
    return model, {
        "hidden_states": latents(batch, channels), "timestep": timestep,
        "encoder_hidden_states": text,
    }  # fmt: skip


def wan_vace(control: int = 48) -> Built:
    model = diffusers.WanVACETransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=3, rope_max_seq_len=32, vace_layers=[0, 2],
        vace_in_channels=control,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 16), "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, 12, 16), "control_hidden_states": latents(1, control),
    }  # fmt: skip


def skyreels() -> Built:
    model = diffusers.SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    return model, wan()[1]


def hunyuan(condition: str | None = None, layers: int = 1, single: int = 1, channels: int = 4) -> Built:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=channels, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=layers,
        num_single_layers=single, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4), image_condition_type=condition,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, channels), "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, 8, 16),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]), "pooled_projections": noise(1, 8),
        "guidance": torch.tensor([6000.0]),
    }  # fmt: skip


def hunyuan15() -> Built:
    model = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_refiner_layers=1, mlp_ratio=2.0, patch_size=1, patch_size_t=1, text_embed_dim=16,
        text_embed_2_dim=8, image_embed_dim=12, rope_axes_dim=(4, 6, 6), target_size=16, task_type="t2v",
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 4, patch=1), "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": noise(1, 6, 16),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "encoder_hidden_states_2": noise(1, 4, 8), "encoder_attention_mask_2": torch.tensor([[1, 1, 0, 0]]),
        "image_embeds": torch.zeros(1, 3, 12),
    }  # fmt: skip


def cosmos25(layers: int = 2) -> Built:
    # The real checkpoint has concat_padding_mask=True, which needs torchvision.
    model = diffusers.CosmosTransformer3DModel(
        in_channels=17, out_channels=16, num_attention_heads=2, attention_head_dim=16, num_layers=layers,
        mlp_ratio=2, text_embed_dim=32, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2),
        rope_scale=(1.0, 3.0, 3.0), concat_padding_mask=False, extra_pos_embed_type=None,
        use_crossattn_projection=True, crossattn_proj_in_channels=64, encoder_hidden_states_channels=32,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 16), "condition_mask": torch.zeros(1, 1, FRAMES, 2 * HEIGHT, 2 * WIDTH),
        "timestep": torch.tensor([0.5]), "encoder_hidden_states": noise(1, 12, 64),
        "padding_mask": torch.zeros(1, 1, 64, 64),
    }  # fmt: skip


def cosmos3(text: int = 7, channels: int = 4) -> Built:
    model = diffusers.Cosmos3OmniTransformer(
        head_dim=16, hidden_size=32, intermediate_size=64, latent_channel=channels, latent_patch_size=2,
        num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2, patch_latent_dim=4 * channels,
        vocab_size=64, rope_scaling={"mrope_section": [4, 2, 2]},
    )  # fmt: skip
    video = torch.arange(text, text + VIDEO)
    return model, {
        "input_ids": torch.arange(text), "text_indexes": torch.arange(text),
        "position_ids": torch.arange(text + VIDEO)[None].expand(3, -1).float(), "und_len": text,
        "sequence_length": text + VIDEO, "vision_tokens": [latents(1, channels)],
        "vision_token_shapes": [(FRAMES, HEIGHT, WIDTH)], "vision_sequence_indexes": video,
        "vision_mse_loss_indexes": video, "vision_timesteps": torch.full((VIDEO,), 500.0),
        "vision_noisy_frame_indexes": [torch.arange(FRAMES)],
    }  # fmt: skip


def cogvideox() -> Built:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2,
        text_embed_dim=8, num_layers=2, sample_width=2 * WIDTH, sample_height=2 * HEIGHT, sample_frames=9,
        patch_size=2, temporal_compression_ratio=4, max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(2, 4).transpose(1, 2), "encoder_hidden_states": noise(2, 8, 8),
        "timestep": torch.tensor([500, 500]), "image_rotary_emb": (noise(VIDEO, 16), noise(VIDEO, 16)),
    }  # fmt: skip


def ltx(heads: int = 2) -> Built:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=heads, attention_head_dim=16,
        cross_attention_dim=16 * heads, num_layers=2, caption_channels=16,
    )  # fmt: skip
    return model, {
        "hidden_states": noise(2, VIDEO, 8), "encoder_hidden_states": noise(2, 6, 16),
        "timestep": torch.tensor([500, 500]), "encoder_attention_mask": torch.ones(2, 6),
        "num_frames": FRAMES, "height": HEIGHT, "width": WIDTH, "rope_interpolation_scale": (1.0, 32.0, 32.0),
    }  # fmt: skip


def ltx2(**more: Any) -> Built:
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, patch_size=1, patch_size_t=1, num_attention_heads=2,
        attention_head_dim=8, cross_attention_dim=16, audio_in_channels=4, audio_out_channels=4,
        audio_num_attention_heads=2, audio_attention_head_dim=4, audio_cross_attention_dim=8, num_layers=2,
        qk_norm="rms_norm_across_heads", caption_channels=16, rope_double_precision=False,
        **more,
    )  # fmt: skip
    return model, {
        "hidden_states": noise(1, VIDEO, 4), "audio_hidden_states": noise(1, 9, 4),
        "encoder_hidden_states": noise(1, 6, 16), "audio_encoder_hidden_states": noise(1, 6, 16),
        "timestep": torch.full((1, 1), 500.0), "encoder_attention_mask": torch.ones(1, 6),
        "audio_encoder_attention_mask": torch.ones(1, 6), "num_frames": FRAMES, "height": HEIGHT,
        "width": WIDTH, "fps": 25.0, "audio_num_frames": 9,
    }  # fmt: skip


def ltx23(**more: Any) -> Built:
    """LTX-2.3: gated attention, a modulated cross-attention, and blocks that can be perturbed."""
    model, inputs = ltx2(
        gated_attn=True, audio_gated_attn=True, cross_attn_mod=True, audio_cross_attn_mod=True,
        perturbed_attn=True, **more,
    )  # fmt: skip
    return model, {**inputs, "sigma": torch.tensor([500.0])}


def ltx25() -> Built:
    """LTX-2.5: LTX-2.3 whose cross-attention does not know the timestep."""
    return ltx23(use_prompt_adaln_single=False, ff_bias=False, audio_ff_bias=False)


def mochi() -> Built:
    model = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=4, out_channels=None, qk_norm="rms_norm", text_embed_dim=16, time_embed_dim=4,
        activation_fn="swiglu", max_sequence_length=6,
    )  # fmt: skip
    valid = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]).bool()
    return model, {
        "hidden_states": latents(2, 4), "encoder_hidden_states": noise(2, 6, 16),
        "timestep": torch.tensor([500, 500]), "encoder_attention_mask": valid,
    }  # fmt: skip


def chronoedit() -> Built:
    model = diffusers.ChronoEditTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32, rope_temporal_skip_len=8,
    )  # fmt: skip
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
        "hidden_states": latents(1, 12), "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, 12, 16), "encoder_hidden_states_image": noise(1, 5, 16),
        "pose_hidden_states": latents(1, 4, frames=FRAMES - 1), "face_pixel_values": noise(1, 3, 5, 16, 16),
    }  # fmt: skip


def consisid() -> Built:
    model = diffusers.ConsisIDTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2,
        text_embed_dim=8, num_layers=2, sample_width=2 * WIDTH, sample_height=2 * HEIGHT, sample_frames=9,
        patch_size=2, temporal_compression_ratio=4, max_text_seq_length=8,
        use_rotary_positional_embeddings=True, cross_attn_interval=1, is_kps=False, is_train_face=False,
        cross_attn_dim_head=1, cross_attn_num_heads=1,
    )  # fmt: skip
    return model, cogvideox()[1]


def motif() -> Built:
    model = diffusers.MotifVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, patch_size=2, patch_size_t=1, text_embed_dim=16, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    given = hunyuan()[1]
    kept = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask")
    return model, {name: given[name] for name in kept}


def framepack() -> Built:
    model = diffusers.HunyuanVideoFramepackTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4), has_image_proj=True,
        image_proj_dim=16, has_clean_x_embedder=True,
    )  # fmt: skip
    return model, {
        **hunyuan()[1], "image_embeds": noise(1, 3, 16), "indices_latents": torch.arange(FRAMES),
        "latents_clean": latents(1, 4, frames=2), "indices_latents_clean": torch.arange(2),
        "latents_history_2x": latents(1, 4, frames=2), "indices_latents_history_2x": torch.arange(2),
        "latents_history_4x": latents(1, 4, frames=16), "indices_latents_history_4x": torch.arange(16),
    }  # fmt: skip


def flux() -> Built:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": noise(1, VIDEO, 4), "encoder_hidden_states": noise(1, 8, 16),
        "pooled_projections": noise(1, 8), "timestep": torch.tensor([0.5]),
        "img_ids": places(VIDEO, 3), "txt_ids": torch.zeros(8, 3),
    }  # fmt: skip


def flux2() -> Built:
    model = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": noise(1, VIDEO, 4), "encoder_hidden_states": noise(1, 8, 16),
        "timestep": torch.tensor([0.5]), "guidance": torch.tensor([1.0]), "img_ids": places(VIDEO, 4)[None],
        "txt_ids": torch.zeros(1, 8, 4),
    }  # fmt: skip


def qwen_image() -> Built:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(1, VIDEO, 16), "encoder_hidden_states": noise(1, 8, 16),
        "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]).bool(),
        "timestep": torch.tensor([0.5]), "img_shapes": [[(1, 12, 16)]],
    }  # fmt: skip
    if diffusers.__version__.startswith("0.36."):  # does not read the length of the text from its mask
        inputs["txt_seq_lens"] = [8]
    return model, inputs


def minimax_h3() -> Built:
    """Text, a small reference, video, audio: 8 + 16 + 192 + 6 rows."""
    model = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=24, num_layers=2, num_refiner_layers=1,
        ffn_dim=32, in_channels=4, audio_in_channels=6, patch_size=(1, 2, 2), text_dim=16, freq_dim=16,
        time_embed_hidden_dim=16, time_embed_dim=16, rope_freq_dim=2,
    )  # fmt: skip
    text, reference, audio = 8, 16, 6
    rows = torch.arange(text + reference + VIDEO + audio)
    video = rows[text : text + reference + VIDEO]
    tags = torch.tensor([1] * text + [0] * (reference + VIDEO) + [2] * audio)
    times = torch.tensor([0] * (text + reference) + [1] * VIDEO + [2] * audio)
    where = torch.zeros(len(rows), 3)
    grid = torch.arange(VIDEO)
    at = slice(text + reference, text + reference + VIDEO)
    where[at] = torch.stack([grid // 64, grid // 8 % 8, grid % 8], 1).float()
    return model, {
        "hidden_states": noise(1, reference + VIDEO, 16), "audio_hidden_states": noise(1, audio, 6),
        "encoder_hidden_states": noise(1, text, 16), "timestep": torch.tensor([0.0, 0.5, 0.6]),
        "timestep_indices": times, "token_tags": tags, "position_ids": where, "video_indices": video,
        "audio_indices": rows[-audio:], "text_indices": rows[:text],
    }  # fmt: skip


def kandinsky5() -> Built:
    model = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, out_visual_dim=4, patch_size=(1, 2, 2),
        model_dim=32, ff_dim=32, num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6),
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 4).movedim(1, -1), "encoder_hidden_states": noise(1, 6, 16),
        "timestep": torch.tensor([500.0]), "pooled_projections": noise(1, 8),
        "visual_rope_pos": [torch.arange(FRAMES), torch.arange(HEIGHT), torch.arange(WIDTH)],
        "text_rope_pos": torch.arange(6),
    }  # fmt: skip


def kandinsky6() -> Built:
    model = diffusers.Kandinsky6Transformer3DModel(
        in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, model_dim=32,
        ff_dim=32, num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6), visual_cond=False,
        in_audio_dim=4, out_audio_dim=4, ca_rope=True, cross_gates=True, fix_modulation=True,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 4).movedim(1, -1), "encoder_hidden_states": noise(1, 6, 16),
        "pooled_projections": noise(1, 8), "timestep": torch.tensor([500.0]),
        "audio_hidden_states": noise(1, 9, 4),
    }  # fmt: skip


def helios() -> Built:
    """One frame of recent history, two of the middle, four old ones: 64 + 16 + 4 tokens."""
    model = diffusers.HeliosTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_dim=(4, 4, 4), is_amplify_history=True,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 4), "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, 12, 16), "indices_hidden_states": torch.arange(7, 7 + FRAMES)[None],
        "latents_history_long": latents(1, 4, frames=4), "latents_history_mid": latents(1, 4, frames=2),
        "latents_history_short": latents(1, 4, frames=1),
        "indices_latents_history_long": torch.arange(4)[None],
        "indices_latents_history_mid": torch.arange(4, 6)[None],
        "indices_latents_history_short": torch.arange(6, 7)[None],
    }  # fmt: skip


def anyflow() -> Built:
    model = diffusers.AnyFlowTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    times = {"timestep": torch.full((1, FRAMES), 500.0), "r_timestep": torch.full((1, FRAMES), 250.0)}
    return model, {
        "hidden_states": latents(1, 16).transpose(1, 2), "encoder_hidden_states": noise(1, 12, 16), **times
    }  # fmt: skip


def z_image() -> Built:
    """Two prompts of different length, each filled up to 32 tokens or 64."""
    model = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[4, 6, 6], axes_lens=[128, 32, 32],
    )  # fmt: skip
    return model, {
        "x": [noise(4, 1, 24, 32), noise(4, 1, 24, 32) + 1], "t": torch.tensor([0.5, 0.5]),
        "cap_feats": [noise(5, 16), noise(40, 16)],
    }  # fmt: skip


def sd3() -> Built:
    model = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=8,
        out_channels=4, pos_embed_max_size=16, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return model, {
        "hidden_states": noise(1, 4, 24, 32), "encoder_hidden_states": noise(1, 8, 16),
        "pooled_projections": noise(1, 8), "timestep": torch.tensor([500]),
    }  # fmt: skip


def allegro() -> Built:
    model = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2,
        cross_attention_dim=24, sample_height=2 * HEIGHT, sample_width=2 * WIDTH, sample_frames=FRAMES,
        caption_channels=16,
    )  # fmt: skip
    axes = torch.meshgrid(torch.arange(FRAMES), torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    turns = [(noise(size, 4), noise(4, size).T) for size in (FRAMES, HEIGHT, WIDTH)]
    return model, {
        "hidden_states": latents(1, 4), "encoder_hidden_states": noise(1, 6, 16),
        "timestep": torch.tensor([500]), "encoder_attention_mask": torch.ones(1, 6),
        "image_rotary_emb": (turns, [axis.flatten()[None] for axis in axes]),
    }  # fmt: skip


def easyanimate() -> Built:
    """The first block has projections of its own for the text, the second shares them."""
    model = diffusers.EasyAnimateTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, patch_size=2,
        num_layers=2, mmdit_layers=1, time_embed_dim=8, text_embed_dim=16,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 4), "encoder_hidden_states": noise(1, 8, 16),
        "timestep": torch.tensor([500]),
    }  # fmt: skip


def places(tokens: int, axes: int) -> torch.Tensor:
    ids = torch.zeros(tokens, axes)
    ids[:, 1], ids[:, 2] = torch.arange(tokens) // 16, torch.arange(tokens) % 16
    return ids


BUILDERS: dict[str, Callable[[], Built]] = {
    "wan": wan,
    "wan i2v": lambda: wan(image=True),
    "wan ti2v": lambda: wan(tokens_timestep=True),
    "wan vace": wan_vace,
    "skyreels": skyreels,
    "hunyuan": hunyuan,
    "lucy": lambda: wan(channels=32),  # the edited video comes in as more channels
    "hunyuan skyreels": lambda: hunyuan(channels=8),  # so does the first picture
    "hunyuan i2v": lambda: hunyuan("token_replace"),
    "hunyuan 1.5": hunyuan15,
    "cosmos 2.5": cosmos25,
    "cosmos 3": cosmos3,
    "cogvideox": cogvideox,
    "ltx": ltx,
    "ltx 2": ltx2,
    "ltx 2.3": ltx23,
    "ltx 2.5": ltx25,
    "mochi": mochi,
    "chronoedit": chronoedit,
    "wan animate": wan_animate,
    "consisid": consisid,
    "motif": motif,
    "framepack": framepack,
    "flux": flux,
    "flux 2": flux2,
    "qwen image": qwen_image,
    "minimax h3": minimax_h3,
    "kandinsky 5": kandinsky5,
    "kandinsky 6": kandinsky6,
    "helios": helios,
    "anyflow": anyflow,
    "z image": z_image,
    "sd3.5": sd3,
    "allegro": allegro,
    "easyanimate": easyanimate,
}


def settled(built: Built, seed: int = 0) -> Built:
    """The model with weights from a generator of its own: modules draw from the global one."""
    model, inputs = built
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim > 1:
                # Queries and keys are drawn larger, so that attention is not uniform and sparsity shows.
                spread = 3.0 if any(part in name for part in QK) else 1.0
                weight.copy_(torch.randn(weight.shape, generator=draw) * spread / weight[0].numel() ** 0.5)
            elif "norm" not in name:
                weight.copy_(0.02 * torch.randn(weight.shape, generator=draw))
    if "return_dict" in inspect.signature(type(model).forward).parameters:  # Cosmos3 of 0.39 has none
        inputs = {**inputs, "return_dict": False}
    return model.eval(), inputs


def need(name: str) -> None:
    """Skips where the installed diffusers has no such class, or cannot import it."""
    try:
        getattr(diffusers, name)
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"diffusers {diffusers.__version__}: {error}")


# Models that came after the oldest diffusers.
LATER = {
    "ltx 2": "LTX2VideoTransformer3DModel",
    "ltx 2.3": "LTX2VideoTransformer3DModel",
    "ltx 2.5": "LTX2VideoTransformer3DModel",
    "cosmos 3": "Cosmos3OmniTransformer",
    "chronoedit": "ChronoEditTransformer3DModel",
    "wan animate": "WanAnimateTransformer3DModel",
    "motif": "MotifVideoTransformer3DModel",
    "flux 2": "Flux2Transformer2DModel",
    "minimax h3": "MiniMaxH3Transformer3DModel",
    "kandinsky 5": "Kandinsky5Transformer3DModel",
    "kandinsky 6": "Kandinsky6Transformer3DModel",
    "helios": "HeliosTransformer3DModel",
    "anyflow": "AnyFlowTransformer3DModel",
    "z image": "ZImageTransformer2DModel",
}


# Models whose class is older than an option that they need.
OPTIONS = {
    "cosmos 2.5": [("CosmosTransformer3DModel", "use_crossattn_projection")],
    "ltx 2.3": [("LTX2VideoTransformer3DModel", "gated_attn")],
    "ltx 2.5": [("LTX2VideoTransformer3DModel", "use_prompt_adaln_single")],
}


def build(name: str) -> Built:
    if name in LATER:
        need(LATER[name])
    for kind, option in OPTIONS.get(name, ()):
        if option not in inspect.signature(getattr(diffusers, kind).__init__).parameters:
            pytest.skip(f"diffusers {diffusers.__version__}: {kind} has no {option}")
    with torch.random.fork_rng():
        return settled(BUILDERS[name]())
