"""Video models that have no relatives here."""

import diffusers
import torch

from .common import FRAMES, HEIGHT, VIDEO, WIDTH, Built, latents, noise


def cogvideox() -> Built:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=8,
        num_layers=2,
        sample_width=2 * WIDTH,
        sample_height=2 * HEIGHT,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
    )
    return model, {
        "hidden_states": latents(2, 4).transpose(1, 2),
        "encoder_hidden_states": noise(2, 8, 8),
        "timestep": torch.tensor([500, 500]),
        "image_rotary_emb": (noise(VIDEO, 16), noise(VIDEO, 16)),
    }


def consisid() -> Built:
    model = diffusers.ConsisIDTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2,
        text_embed_dim=8, num_layers=2, sample_width=2 * WIDTH, sample_height=2 * HEIGHT, sample_frames=9,
        patch_size=2, temporal_compression_ratio=4, max_text_seq_length=8,
        use_rotary_positional_embeddings=True, cross_attn_interval=1, is_kps=False, is_train_face=False,
        cross_attn_dim_head=1, cross_attn_num_heads=1,
    )  # fmt: skip
    return model, cogvideox()[1]


def mochi() -> Built:
    model = diffusers.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        out_channels=None,
        qk_norm="rms_norm",
        text_embed_dim=16,
        time_embed_dim=4,
        activation_fn="swiglu",
        max_sequence_length=6,
    )
    valid = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]).bool()
    return model, {
        "hidden_states": latents(2, 4),
        "encoder_hidden_states": noise(2, 6, 16),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": valid,
    }


def allegro() -> Built:
    model = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=24,
        sample_height=2 * HEIGHT,
        sample_width=2 * WIDTH,
        sample_frames=FRAMES,
        caption_channels=16,
    )
    axes = torch.meshgrid(torch.arange(FRAMES), torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    turns = [(noise(size, 4), noise(4, size).T) for size in (FRAMES, HEIGHT, WIDTH)]
    return model, {
        "hidden_states": latents(1, 4),
        "encoder_hidden_states": noise(1, 6, 16),
        "timestep": torch.tensor([500]),
        "encoder_attention_mask": torch.ones(1, 6),
        "image_rotary_emb": (turns, [axis.flatten()[None] for axis in axes]),
    }


def easyanimate() -> Built:
    """The first block has projections of its own for the text, the second shares them."""
    model = diffusers.EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        patch_size=2,
        num_layers=2,
        mmdit_layers=1,
        time_embed_dim=8,
        text_embed_dim=16,
    )
    return model, {
        "hidden_states": latents(1, 4),
        "encoder_hidden_states": noise(1, 8, 16),
        "timestep": torch.tensor([500]),
    }


def kandinsky5() -> Built:
    model = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=8,
        time_dim=16,
        out_visual_dim=4,
        patch_size=(1, 2, 2),
        model_dim=32,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
    )
    return model, {
        "hidden_states": latents(1, 4).movedim(1, -1),
        "encoder_hidden_states": noise(1, 6, 16),
        "timestep": torch.tensor([500.0]),
        "pooled_projections": noise(1, 8),
        "visual_rope_pos": [torch.arange(FRAMES), torch.arange(HEIGHT), torch.arange(WIDTH)],
        "text_rope_pos": torch.arange(6),
    }


def kandinsky6() -> Built:
    model = diffusers.Kandinsky6Transformer3DModel(
        in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, model_dim=32,
        ff_dim=32, num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6), visual_cond=False,
        in_audio_dim=4, out_audio_dim=4, ca_rope=True, cross_gates=True, fix_modulation=True,
    )  # fmt: skip
    return model, {
        "hidden_states": latents(1, 4).movedim(1, -1),
        "encoder_hidden_states": noise(1, 6, 16),
        "pooled_projections": noise(1, 8),
        "timestep": torch.tensor([500.0]),
        "audio_hidden_states": noise(1, 9, 4),
    }


def minimax_h3() -> Built:
    """Text, a small reference, video, audio: 8 + 16 + 192 + 6 rows."""
    model = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=32,
        in_channels=4,
        audio_in_channels=6,
        patch_size=(1, 2, 2),
        text_dim=16,
        freq_dim=16,
        time_embed_hidden_dim=16,
        time_embed_dim=16,
        rope_freq_dim=2,
    )
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
        "hidden_states": noise(1, reference + VIDEO, 16),
        "audio_hidden_states": noise(1, audio, 6),
        "encoder_hidden_states": noise(1, text, 16),
        "timestep": torch.tensor([0.0, 0.5, 0.6]),
        "timestep_indices": times,
        "token_tags": tags,
        "position_ids": where,
        "video_indices": video,
        "audio_indices": rows[-audio:],
        "text_indices": rows[:text],
    }
