"""Reads a transformer's config.json as an Architecture. Anything that is not understood is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import InputError
from .architecture import Architecture
from .config_file import ConfigValues, find_config, load_config
from .models import (
    ALLEGRO,
    CONTROL,
    COSMOS3,
    COSMOS25,
    EASYANIMATE,
    FLUX,
    FLUX2,
    HUNYUAN,
    HUNYUAN15,
    KANDINSKY5,
    LTX,
    LTX2,
    MINIMAX,
    MOCHI,
    QWEN_IMAGE,
    SD35,
    VACE,
    WAN21,
    Z_IMAGE,
)

Fields = dict[str, Any]


def read_architecture(path: str | Path) -> Architecture:
    """Reads a config.json, or the one in a model's or a pipeline's folder."""
    file = find_config(Path(path))
    config = load_config(file)
    kind = config.get("_class_name")
    reader = READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        got = "no _class_name" if kind is None else f"_class_name {str(kind)[:80]!r}"
        raise InputError(f"{file}: {got}; wanted the config of a supported transformer: {', '.join(READERS)}")
    values = ConfigValues(file, config)
    fields = reader(values)
    compression = (fields["frame_compression"], fields["pixel_compression"])
    notes = [
        f"{kind}: the config does not say how the VAE compresses; {compression[0]} x in time and "
        f"{compression[1]} x in space are assumed",
        f"assumed: forward passes per step: {fields.get('passes', 2)}, {fields['text_tokens']} text tokens",
        "weights are estimated from the blocks' matrices; text encoder and VAE are not counted",
    ]
    if values.missing:
        notes.append(f"not in the config, so the class's defaults: {', '.join(values.missing)}")
    name = file.parent.name or file.name
    return Architecture(name=name, **fields, notes=(*notes, *values.notes))


def _attention(values: ConfigValues, heads: int, head_dim: int, layers: int) -> Fields:
    heads = values.whole("num_attention_heads", heads)
    head_dim = values.whole("attention_head_dim", head_dim)
    return {
        "layers": values.whole("num_layers", layers),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim,
        "width": heads * head_dim,
    }


def _channels(values: ConfigValues, channels: int, out: int | None = None) -> Fields:
    inside = values.whole("in_channels", channels)
    return {"in_channels": inside, "out_channels": values.whole("out_channels", out or inside)}


def _wan(values: ConfigValues) -> Fields:
    fields = {**_attention(values, 40, 128, 40), **_channels(values, 16, 16)}
    # the VAEs of the family: none (pixels), Wan2.1 (16 channels), Wan2.2-TI2V (48 channels)
    compression = {3: (1, 1), 16: (4, 8), 48: (4, 16)}.get(fields["out_channels"])
    if compression is None:
        raise InputError(f"{values.file}: out_channels={fields['out_channels']}: wanted a Wan VAE's 16 or 48, or 3")
    return {
        **fields,
        "mlp": values.whole("ffn_dim", 13824),
        "mlp_matrices": 2,
        "text_tokens": 512,
        "text": "cross",
        "text_width": fields["width"],
        "patch": values.triple("patch_size", (1, 2, 2)),
        "frame_compression": compression[0],
        "pixel_compression": compression[1],
    }


def _hunyuan(values: ConfigValues) -> Fields:
    fields = _attention(values, 24, 128, 20)
    fields["layers"] += values.whole("num_single_layers", 40)
    space = values.whole("patch_size", 2)
    return {
        **fields,
        **_channels(values, 16, 16),
        "mlp": round(values.ratio("mlp_ratio", 4.0) * fields["width"]),
        "mlp_matrices": 2,
        "text_tokens": HUNYUAN.text_tokens,
        "text": "joint",
        "text_width": fields["width"],
        "patch": (values.whole("patch_size_t", 1), space, space),
        "frame_compression": 4,
        "pixel_compression": 8,
        "passes": 1 if values.flag("guidance_embeds", True) else 2,
        "frames": HUNYUAN.frames,
        "dense_steps": HUNYUAN.dense_steps,
        "dense_layers": HUNYUAN.dense_layers,
    }


def _cosmos(values: ConfigValues) -> Fields:
    fields = _attention(values, 32, 128, 28)
    if values.config.get("img_context_dim_in") is not None:
        values.notes.append("the attention to an image context is not counted")
    return {
        **fields,
        **_channels(values, 16, 16),
        "mlp": round(values.ratio("mlp_ratio", 4.0) * fields["width"]),
        "mlp_matrices": 2,
        "text_tokens": COSMOS25.text_tokens,
        "text": "cross",
        "text_width": values.whole("text_embed_dim", 1024),
        "patch": values.triple("patch_size", (1, 2, 2)),
        "frame_compression": 4,
        "pixel_compression": 8,
        "steps": COSMOS25.steps,
        "size": COSMOS25.size,
        "frames": COSMOS25.frames,
        "dense_steps": COSMOS25.dense_steps,
        "dense_layers": COSMOS25.dense_layers,
    }


def _cosmos3(values: ConfigValues) -> Fields:
    heads, kv_heads = values.whole("num_attention_heads", 32), values.whole("num_key_value_heads", 8)
    if heads % kv_heads:
        raise InputError(f"{values.file}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    patch, channels = values.whole("latent_patch_size", 2), values.whole("latent_channel", 48)
    return {
        "layers": values.whole("num_hidden_layers", 36),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": values.whole("head_dim", 128),
        "width": values.whole("hidden_size", 4096),
        "mlp": values.whole("intermediate_size", 12288),
        "mlp_matrices": 3 if values.text("hidden_act", "silu") == "silu" else 2,
        "in_channels": channels,
        "out_channels": channels,
        "patch": (1, patch, patch),
        **{
            name: getattr(COSMOS3, name)
            for name in (
                "text_tokens",
                "text",
                "text_width",
                "frame_compression",
                "pixel_compression",
                "pads",
                "steps",
                "frames",
                "density",
                "dense_steps",
                "dense_layers",
            )
        },
    }


def _cogvideox(values: ConfigValues) -> Fields:
    fields = _attention(values, 30, 64, 30)
    space = values.whole("patch_size", 2)
    frames = 1 if values.config.get("patch_size_t") is None else values.whole("patch_size_t", 1)
    return {
        **fields,
        **_channels(values, 16, 16),
        "mlp": 4 * fields["width"],
        "mlp_matrices": 2,
        "text_tokens": values.whole("max_text_seq_length", 226),
        "text": "joint",
        "text_width": fields["width"],
        "patch": (frames, space, space),
        "frame_compression": values.whole("temporal_compression_ratio", 4),
        "pixel_compression": 8,
        "size": (720, 480),
        "frames": 49,
    }


def _like(
    base: Architecture, layers: Mapping[str, int] | None = None, mlp: str | None = None, width: str | None = None
) -> Callable[[ConfigValues], Fields]:
    """A reader for a class whose blocks are those of `base`, with the sizes that the config names.

    Args:
        base: Supplies everything that a config does not say.
        layers: The keys whose sum is the number of blocks, with the class's defaults; None: one key.
        mlp: The key of the feed-forward's width; None: in proportion to the model's width.
        width: The key of the residual stream's width; None: heads x head dim.
    """

    def read(values: ConfigValues) -> Fields:
        blocks = layers or {"num_layers": base.layers}
        heads = values.whole("num_attention_heads", base.heads)
        head_dim = values.whole("attention_head_dim", base.head_dim)
        stream = heads * head_dim if width is None else values.whole(width, base.width)
        wide = base.mlp * stream // base.width if mlp is None else values.whole(mlp, base.mlp)
        return {
            **_kept(values, base),
            "layers": sum(values.whole(name, count) for name, count in blocks.items()),
            "heads": heads,
            "kv_heads": heads,
            "head_dim": head_dim,
            "width": stream,
            "mlp": wide,
            "text_width": stream if base.text_width == base.width else base.text_width,
        }

    return read


def _kept(values: ConfigValues, base: Architecture) -> Fields:
    """Everything that a config does not say, taken from `base` except its name and its weights."""
    own = ("name", "reference", "notes", "parameters", "text_encoder", "others")
    values.notes.extend(base.notes)
    return {field.name: getattr(base, field.name) for field in dataclasses.fields(base) if field.name not in own}


def _kandinsky(width: int, mlp: int, layers: int, axes: tuple[int, int, int]) -> Callable[[ConfigValues], Fields]:
    """A reader for a class with these defaults; its configs name widths and the axes of the rotary
    embedding."""

    def read(values: ConfigValues) -> Fields:
        stream, head_dim = values.whole("model_dim", width), sum(values.triple("axes_dims", axes))
        heads = values.parts(stream, head_dim)
        channels = values.whole("in_visual_dim", KANDINSKY5.in_channels)
        return {
            **_kept(values, KANDINSKY5),
            "layers": values.whole("num_visual_blocks", layers),
            "heads": heads,
            "kv_heads": heads,
            "head_dim": head_dim,
            "width": stream,
            "text_width": stream,
            "mlp": values.whole("ff_dim", mlp),
            "patch": values.triple("patch_size", KANDINSKY5.patch),
            "in_channels": 2 * channels + 1 if values.flag("visual_cond", False) else channels,
            "out_channels": values.whole("out_visual_dim", KANDINSKY5.out_channels),
        }

    return read


def _z_image(values: ConfigValues) -> Fields:
    stream, heads = values.whole("dim", Z_IMAGE.width), values.whole("n_heads", Z_IMAGE.heads)
    refiners = values.whole("n_refiner_layers", 2)
    return {
        **_kept(values, Z_IMAGE),
        "layers": values.whole("n_layers", Z_IMAGE.layers - 2) + refiners,
        "heads": heads,
        "kv_heads": values.whole("n_kv_heads", heads),
        "head_dim": values.parts(stream, heads),
        "width": stream,
        "text_width": stream,
        "mlp": stream * 8 // 3,
    }


def _vace(values: ConfigValues) -> Fields:
    fields = _wan(values)
    control = values.config.get("vace_layers")
    blocks = len(control) if isinstance(control, list) else VACE.layers - WAN21.layers
    values.notes.append(CONTROL)
    return {**fields, "layers": fields["layers"] + blocks}


READERS: dict[str, Callable[[ConfigValues], Fields]] = {
    "WanTransformer3DModel": _wan,
    "HunyuanVideoTransformer3DModel": _hunyuan,
    "CosmosTransformer3DModel": _cosmos,
    "Cosmos3OmniTransformer": _cosmos3,
    "CogVideoXTransformer3DModel": _cogvideox,
    "ConsisIDTransformer3DModel": _cogvideox,
    "WanVACETransformer3DModel": _vace,
    "WanAnimateTransformer3DModel": _wan,
    "SkyReelsV2Transformer3DModel": _wan,
    "ChronoEditTransformer3DModel": _wan,
    "HunyuanVideoFramepackTransformer3DModel": _hunyuan,
    "MotifVideoTransformer3DModel": _hunyuan,
    "HunyuanVideo15Transformer3DModel": _like(HUNYUAN15),
    "MochiTransformer3DModel": _like(MOCHI),
    "LTXVideoTransformer3DModel": _like(LTX),
    "LTX2VideoTransformer3DModel": _like(LTX2),
    "MiniMaxH3Transformer3DModel": _like(MINIMAX, mlp="ffn_dim", width="hidden_size"),
    "FluxTransformer2DModel": _like(FLUX, {"num_layers": 19, "num_single_layers": 38}),
    "Flux2Transformer2DModel": _like(FLUX2, {"num_layers": 8, "num_single_layers": 48}),
    "QwenImageTransformer2DModel": _like(QWEN_IMAGE),
    "HeliosTransformer3DModel": _wan,
    "AnyFlowTransformer3DModel": _wan,
    "Kandinsky5Transformer3DModel": _kandinsky(2048, 5120, 32, (16, 24, 24)),
    "Kandinsky6Transformer3DModel": _kandinsky(4096, 16384, 60, (32, 48, 48)),
    "AllegroTransformer3DModel": _like(ALLEGRO),
    "EasyAnimateTransformer3DModel": _like(EASYANIMATE),
    "ZImageTransformer2DModel": _z_image,
    "SD3Transformer2DModel": _like(SD35, {"num_layers": 18}),
}
