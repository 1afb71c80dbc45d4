"""Reads a transformer's config.json as an Architecture. Anything that is not understood is refused.

Each class has a reader; what a config does not say is taken from the known model whose blocks are the same.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import InputError
from .config_file import ConfigValues, find_config, load_config
from .models import MODELS, Architecture

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


def _base(name: str) -> Fields:
    """A known model without its name, its weights and what is known of it alone."""
    fields = {field.name: getattr(MODELS[name], field.name) for field in dataclasses.fields(Architecture)}
    own = ("name", "paper", "notes", "parameters", "text_encoder", "others")
    return {key: value for key, value in fields.items() if key not in own}


def _noted(values: ConfigValues, name: str) -> Fields:
    """The same, with the notes of that model."""
    values.notes.extend(MODELS[name].notes)
    return _base(name)


def _streams(heads: int, head_dim: int, width: int | None = None) -> Fields:
    """The widths of blocks without grouped queries."""
    width = heads * head_dim if width is None else width
    return {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "width": width, "text_width": width}


def _attention(values: ConfigValues, heads: int, head_dim: int, layers: int) -> Fields:
    heads = values.whole("num_attention_heads", heads)
    streams = _streams(heads, values.whole("attention_head_dim", head_dim))
    return {**streams, "layers": values.whole("num_layers", layers)}


def _channels(values: ConfigValues) -> Fields:
    inside = values.whole("in_channels", 16)
    return {"in_channels": inside, "out_channels": values.whole("out_channels", 16)}


def _wan(values: ConfigValues) -> Fields:
    fields = {**_base("wan2.1-t2v-14b"), **_attention(values, 40, 128, 40), **_channels(values)}
    # the VAEs of the family: none (pixels), Wan2.1 (16 channels), Wan2.2-TI2V (48 channels)
    compression = {3: (1, 1), 16: (4, 8), 48: (4, 16)}.get(fields["out_channels"])
    if compression is None:
        raise InputError(f"{values.file}: out_channels={fields['out_channels']}: wanted a Wan VAE's 16 or 48, or 3")
    return {
        **fields,
        "mlp": values.whole("ffn_dim", 13824),
        "patch": values.triple("patch_size", (1, 2, 2)),
        "frame_compression": compression[0],
        "pixel_compression": compression[1],
    }


def _vace(values: ConfigValues) -> Fields:
    fields = _wan(values)
    control = values.config.get("vace_layers")
    values.notes.extend(MODELS["wan2.1-vace-14b"].notes)
    return {**fields, "layers": fields["layers"] + (len(control) if isinstance(control, list) else 8)}


def _hunyuan(values: ConfigValues) -> Fields:
    fields = {**_base("hunyuanvideo"), **_attention(values, 24, 128, 20)}
    fields["layers"] += values.whole("num_single_layers", 40)
    space = values.whole("patch_size", 2)
    return {
        **fields,
        **_channels(values),
        "mlp": round(values.ratio("mlp_ratio", 4.0) * fields["width"]),
        "patch": (values.whole("patch_size_t", 1), space, space),
        "passes": 1 if values.flag("guidance_embeds", True) else 2,
    }


def _cosmos(values: ConfigValues) -> Fields:
    fields = {**_base("cosmos-predict2.5-14b"), **_attention(values, 32, 128, 28)}
    if values.config.get("img_context_dim_in") is not None:
        values.notes.append("the attention to an image context is not counted")
    return {
        **fields,
        **_channels(values),
        "mlp": round(values.ratio("mlp_ratio", 4.0) * fields["width"]),
        "text_width": values.whole("text_embed_dim", 1024),
        "patch": values.triple("patch_size", (1, 2, 2)),
    }


def _cosmos3(values: ConfigValues) -> Fields:
    heads, kv_heads = values.whole("num_attention_heads", 32), values.whole("num_key_value_heads", 8)
    if heads % kv_heads:
        raise InputError(f"{values.file}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    patch, channels = values.whole("latent_patch_size", 2), values.whole("latent_channel", 48)
    return {
        **_base("cosmos3-nano-16b"),
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
    }


def _cogvideox(values: ConfigValues) -> Fields:
    fields = {**_base("cogvideox-5b"), **_attention(values, 30, 64, 30), "in_batch": 1}
    space = values.whole("patch_size", 2)
    frames = 1 if values.config.get("patch_size_t") is None else values.whole("patch_size_t", 1)
    return {
        **fields,
        **_channels(values),
        "mlp": 4 * fields["width"],
        "text_tokens": values.whole("max_text_seq_length", 226),
        "patch": (frames, space, space),
        "frame_compression": values.whole("temporal_compression_ratio", 4),
    }


def _like(
    name: str, layers: Mapping[str, int] | None = None, mlp: str | None = None, width: str | None = None
) -> Callable[[ConfigValues], Fields]:
    """A reader for a class whose blocks are those of a known model, with the sizes that the config names.

    Args:
        name: The model that supplies everything that a config does not say.
        layers: The keys whose sum is the number of blocks, with the class's defaults; None: one key.
        mlp: The key of the feed-forward's width; None: in proportion to the model's width.
        width: The key of the residual stream's width; None: heads x head dim.
    """
    base = MODELS[name]

    def read(values: ConfigValues) -> Fields:
        heads = values.whole("num_attention_heads", base.heads)
        head_dim = values.whole("attention_head_dim", base.head_dim)
        fields = _streams(heads, head_dim, None if width is None else values.whole(width, base.width))
        stream = fields["width"]
        fields["mlp"] = base.mlp * stream // base.width if mlp is None else values.whole(mlp, base.mlp)
        if base.text_width != base.width:
            fields["text_width"] = base.text_width
        blocks = layers or {"num_layers": base.layers}
        fields["layers"] = sum(values.whole(key, count) for key, count in blocks.items())
        return {**_noted(values, name), **fields}

    return read


def _kandinsky(width: int, mlp: int, layers: int, axes: tuple[int, int, int]) -> Callable[[ConfigValues], Fields]:
    """A reader for a class with these defaults; its configs name widths and the axes of the rotary
    embedding."""
    base = MODELS["kandinsky5-lite"]

    def read(values: ConfigValues) -> Fields:
        stream, head_dim = values.whole("model_dim", width), sum(values.triple("axes_dims", axes))
        heads = values.parts(stream, head_dim)
        channels = values.whole("in_visual_dim", base.in_channels)
        return {
            **_noted(values, base.name),
            **_streams(heads, head_dim, stream),
            "layers": values.whole("num_visual_blocks", layers),
            "mlp": values.whole("ff_dim", mlp),
            "patch": values.triple("patch_size", base.patch),
            "in_channels": 2 * channels + 1 if values.flag("visual_cond", False) else channels,
            "out_channels": values.whole("out_visual_dim", base.out_channels),
        }

    return read


def _z_image(values: ConfigValues) -> Fields:
    base = MODELS["z-image"]
    stream, heads = values.whole("dim", base.width), values.whole("n_heads", base.heads)
    refiners = values.whole("n_refiner_layers", 2)
    return {
        **_noted(values, base.name),
        "layers": values.whole("n_layers", base.layers - 2) + refiners,
        **_streams(heads, values.parts(stream, heads), stream),
        "kv_heads": values.whole("n_kv_heads", heads),
        "mlp": stream * 8 // 3,
    }


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
    "HunyuanVideo15Transformer3DModel": _like("hunyuanvideo-1.5"),
    "MochiTransformer3DModel": _like("mochi-1"),
    "LTXVideoTransformer3DModel": _like("ltx-video"),
    "LTX2VideoTransformer3DModel": _like("ltx-2"),
    "MiniMaxH3Transformer3DModel": _like("minimax-h3", mlp="ffn_dim", width="hidden_size"),
    "FluxTransformer2DModel": _like("flux.1-dev", {"num_layers": 19, "num_single_layers": 38}),
    "Flux2Transformer2DModel": _like("flux.2-dev", {"num_layers": 8, "num_single_layers": 48}),
    "QwenImageTransformer2DModel": _like("qwen-image"),
    "HeliosTransformer3DModel": _wan,
    "AnyFlowTransformer3DModel": _wan,
    "Kandinsky5Transformer3DModel": _kandinsky(2048, 5120, 32, (16, 24, 24)),
    "Kandinsky6Transformer3DModel": _kandinsky(4096, 16384, 60, (32, 48, 48)),
    "AllegroTransformer3DModel": _like("allegro"),
    "EasyAnimateTransformer3DModel": _like("easyanimate-v5.1-12b"),
    "ZImageTransformer2DModel": _z_image,
    "SD3Transformer2DModel": _like("sd3.5-large", {"num_layers": 18}),
}
