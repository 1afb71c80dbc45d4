"""The architectures as data, held against the real modules of diffusers: torch counts their FLOPs on the meta
device at full size, where nothing is computed or stored."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from residua.tools.plan import MODELS, cost

diffusers = pytest.importorskip("diffusers")

Built = tuple[torch.nn.Module, dict[str, Any]]


def wan(layers: int) -> Built:
    model = diffusers.WanTransformer3DModel(num_layers=layers, in_channels=36, out_channels=16)
    return model, {
        "hidden_states": torch.empty(1, 36, 21, 90, 160),
        "timestep": torch.empty(1, dtype=torch.long),
        "encoder_hidden_states": torch.empty(1, 512, 4096),
    }


def world(layers: int) -> Built:
    from residua.world.model import CONTEXT_TOKENS, TRANSFORMER_CONFIG

    model = diffusers.WanTransformer3DModel(**{**TRANSFORMER_CONFIG, "num_layers": layers})
    return model, {
        "hidden_states": torch.empty(1, TRANSFORMER_CONFIG["in_channels"], 32, 64, 64),
        "timestep": torch.empty(1, dtype=torch.long),
        "encoder_hidden_states": torch.empty(1, CONTEXT_TOKENS, TRANSFORMER_CONFIG["text_dim"]),
    }


def hunyuan(layers: int) -> Built:
    model = diffusers.HunyuanVideoTransformer3DModel(num_layers=layers // 2, num_single_layers=layers // 2)
    return model, {
        "hidden_states": torch.empty(1, 16, 33, 90, 160),
        "timestep": torch.empty(1, dtype=torch.long),
        "encoder_hidden_states": torch.empty(1, 256, 4096),
        "encoder_attention_mask": torch.empty(1, 256, dtype=torch.bool),
        "pooled_projections": torch.empty(1, 768),
        "guidance": torch.empty(1),
    }


def cosmos25(layers: int) -> Built:
    # the padding mask comes in as a channel of the latents: resizing it would need torchvision
    model = diffusers.CosmosTransformer3DModel(
        num_layers=layers,
        in_channels=18,
        num_attention_heads=40,
        concat_padding_mask=False,
        extra_pos_embed_type=None,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=100352,
    )
    return model, {
        "hidden_states": torch.empty(1, 18, 24, 88, 160),
        "timestep": torch.empty(1),
        "encoder_hidden_states": torch.empty(1, 512, 100352),
    }


def cosmos3(layers: int) -> Built:
    model = diffusers.Cosmos3OmniTransformer(num_hidden_layers=layers)
    text, video = 512, 44160
    # the rotary embedding asks for an autocast dtype, which the meta device does not have
    angles = torch.empty(1, text + video, 128)
    model.rotary_emb.forward = lambda **_: (angles, angles)
    places = torch.empty(video, dtype=torch.long)
    return model, {
        "input_ids": torch.empty(text, dtype=torch.long),
        "text_indexes": torch.empty(text, dtype=torch.long),
        "position_ids": torch.empty(3, text + video),
        "und_len": text,
        "sequence_length": text + video,
        "vision_tokens": [torch.empty(1, 48, 48, 45, 80)],
        "vision_token_shapes": [(48, 23, 40)],
        "vision_sequence_indexes": places,
        "vision_mse_loss_indexes": places,
        "vision_timesteps": torch.empty(video),
        "vision_noisy_frame_indexes": [torch.empty(48, dtype=torch.long)],
    }


BUILDERS: dict[str, Callable[[int], Built]] = {
    "wan2.2-i2v-a14b": wan,
    "world": world,
    "hunyuanvideo": hunyuan,
    "cosmos-predict2.5-14b": cosmos25,
    "cosmos3-nano-16b": cosmos3,
}


def count(name: str, layers: int) -> int:
    with torch.device("meta"), torch.no_grad():
        try:
            model, inputs = BUILDERS[name](layers)
        except (AttributeError, TypeError) as error:  # an older diffusers that lacks the model, or an option of it
            if diffusers.__version__ < "0.42":
                pytest.skip(f"diffusers {diffusers.__version__}: {error}")
            raise
        with FlopCounterMode(display=False) as counter:
            model(**inputs, return_dict=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", BUILDERS)
def test_flops_are_those_of_the_real_module(name: str) -> None:
    two, four = count(name, 2), count(name, 4)
    whole = two + (MODELS[name].layers - 2) * (four - two) // 2
    tokens = math.prod(cost.token_grid(MODELS[name], MODELS[name].size, MODELS[name].frames))
    forward = cost.count_forward(MODELS[name], tokens)
    # left out are modulation, timestep and text embedders; they weigh something in the small model only
    assert forward.attention_flops + forward.rest_flops == pytest.approx(whole, rel=2e-3)


def test_presets_and_limits_are_those_of_the_integration() -> None:
    families = pytest.importorskip("residua.hosts.diffusers.families")
    settings = pytest.importorskip("residua.hosts.settings")
    classes = {
        "hunyuanvideo": "HunyuanVideoTransformer3DModel",
        "wan2.2-i2v-a14b": "WanTransformer3DModel",
        "world": "WanTransformer3DModel",
        "cosmos-predict2.5-14b": "CosmosTransformer3DModel",
        "cosmos3-nano-16b": "Cosmos3OmniTransformer",
    }
    prefixes = {
        "wan2.1-vace": "WanVACETransformer3DModel",
        "wan2.2-animate": "WanAnimateTransformer3DModel",
        "wan": "WanTransformer3DModel",
        "hunyuanvideo-1.5": "HunyuanVideo15Transformer3DModel",
        "framepack": "HunyuanVideoFramepackTransformer3DModel",
        "skyreels": "SkyReelsV2Transformer3DModel",
        "chronoedit": "ChronoEditTransformer3DModel",
        "cosmos": "CosmosTransformer3DModel",
        "cogvideox": "CogVideoXTransformer3DModel",
        "consisid": "ConsisIDTransformer3DModel",
        "mochi": "MochiTransformer3DModel",
        "ltx-video": "LTXVideoTransformer3DModel",
        "ltx-2": "LTX2VideoTransformer3DModel",
        "minimax": "MiniMaxH3Transformer3DModel",
        "flux.1": "FluxTransformer2DModel",
        "flux.2": "Flux2Transformer2DModel",
        "qwen": "QwenImageTransformer2DModel",
        "helios": "HeliosTransformer3DModel",
        "anyflow": "AnyFlowTransformer3DModel",
        "kandinsky5": "Kandinsky5Transformer3DModel",
        "allegro": "AllegroTransformer3DModel",
        "easyanimate": "EasyAnimateTransformer3DModel",
        "z-image": "ZImageTransformer2DModel",
        "sd3.5": "SD3Transformer2DModel",
    }
    for name, architecture in MODELS.items():
        kind = classes.get(name) or next(kind for prefix, kind in prefixes.items() if name.startswith(prefix))
        preset = families.supported()[kind].preset
        ours = (architecture.density, architecture.dense_steps, architecture.dense_layers)
        assert ours == (preset.density, preset.dense_steps, preset.dense_layers), name
    assert settings.MIN_TOKENS == cost.MIN_TOKENS
    for share, total in ((0.03, 40), (0.2, 50), (2, 35), (0.0, 7), (1.0, 7)):
        assert settings.part_of(share, total) == cost.part_of(share, total)


def test_every_alias_names_a_model() -> None:
    from residua.tools.plan.models import ALIASES
    from residua.tools.plan.request import find_model

    assert set(ALIASES.values()) <= set(MODELS)
    assert not set(ALIASES) & set(MODELS)
    assert find_model("Wan-AI/Wan2.2-I2V-A14B-Diffusers") is MODELS["wan2.2-i2v-a14b"]
    assert find_model("cogvideox") is MODELS["cogvideox-5b"]


WAN_14B = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
IMAGE = {"image_dim": 1280, "added_kv_proj_dim": 5120}
CHANNELS = {"in_visual_dim": 16, "out_visual_dim": 16}
RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "wan2.2-i2v-a14b": ("WanTransformer3DModel", {"in_channels": 36}),
    "wan2.2-ti2v-5b": (
        "WanTransformer3DModel",
        {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48},
    ),
    "wan2.1-i2v-14b": ("WanTransformer3DModel", {"in_channels": 36, **IMAGE}),
    "wan2.1-t2v-1.3b": ("WanTransformer3DModel", {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}),
    "wan2.1-vace-14b": ("WanVACETransformer3DModel", {}),
    "wan2.2-animate-14b": ("WanAnimateTransformer3DModel", {"added_kv_proj_dim": 5120}),
    "skyreels-v2-14b": ("SkyReelsV2Transformer3DModel", WAN_14B),
    "hunyuanvideo": ("HunyuanVideoTransformer3DModel", {}),
    "hunyuanvideo-1.5": ("HunyuanVideo15Transformer3DModel", {}),
    "cosmos1-7b": ("CosmosTransformer3DModel", {}),
    "cosmos3-nano-16b": ("Cosmos3OmniTransformer", {}),
    "cogvideox-5b": ("CogVideoXTransformer3DModel", {"num_attention_heads": 48, "num_layers": 42}),
    "mochi-1": ("MochiTransformer3DModel", {}),
    "ltx-video": ("LTXVideoTransformer3DModel", {}),
    "ltx-2": ("LTX2VideoTransformer3DModel", {}),
    "minimax-h3": ("MiniMaxH3Transformer3DModel", {}),
    "flux.1-dev": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    "flux.2-dev": ("Flux2Transformer2DModel", {}),
    "qwen-image": ("QwenImageTransformer2DModel", {}),
    "helios-14b": ("HeliosTransformer3DModel", {}),
    "anyflow-14b": ("AnyFlowTransformer3DModel", {}),
    "kandinsky5-lite": ("Kandinsky5Transformer3DModel", {"model_dim": 1792, "ff_dim": 7168, **CHANNELS}),
    "kandinsky5-pro": (
        "Kandinsky5Transformer3DModel",
        {
            "model_dim": 4096,
            "ff_dim": 16384,
            "num_visual_blocks": 60,
            "num_text_blocks": 4,
            "time_dim": 1024,
            "axes_dims": (32, 48, 48),
            **CHANNELS,
        },
    ),
    "allegro": ("AllegroTransformer3DModel", {}),
    "easyanimate-v5.1-12b": ("EasyAnimateTransformer3DModel", {"in_channels": 16, "out_channels": 16, "patch_size": 2}),
    "z-image": ("ZImageTransformer2DModel", {}),
    "sd3.5-large": (
        "SD3Transformer2DModel",
        {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "qk_norm": "rms_norm"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED)
def test_weights_are_those_of_the_real_module(name: str) -> None:
    kind, config = RELEASED[name]
    if not hasattr(diffusers, kind):
        pytest.skip(f"diffusers {diffusers.__version__} has no {kind}")
    with torch.device("meta"):
        model = getattr(diffusers, kind)(**config)
    counted = sum(one.numel() for one in model.parameters()) / 1e9
    assert MODELS[name].parameters == pytest.approx(counted, rel=0.005)
