"""A stand-in for ComfyUI with the interface that the node relies on: tiny video transformers that call
attention with transformer_options, a model patcher with wrappers, and a sampler with guidance."""

from __future__ import annotations

import uuid
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

DIM, HEADS = 32, 2
GRID = (3, 8, 8)  # tokens


def attend(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, **more: Any) -> Tensor:
    """Calls attention as the host does: an override in transformer_options takes the call."""
    override = (more.get("transformer_options") or {}).get("optimized_attention_override")
    return func(q, k, v, heads, **more) if override is None else override(func, q, k, v, heads, **more)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **more: Any,
) -> Tensor:
    """The host's dense function: [B, N, H * D], or [B, H, N, D] with the skip flags."""
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, split: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.cross = nn.Linear(DIM, DIM)
        self.split = split  # [B, H, N, D] instead of [B, N, H * D]

    def forward(self, x: Tensor, options: dict[str, Any], mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(functional.layer_norm(x, (DIM,))).chunk(3, -1)
        q = 3 * q  # attention that is not uniform
        if self.split:
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
            out = attend(
                dense,
                q,
                k,
                v,
                HEADS,
                mask=mask,
                skip_reshape=True,
                skip_output_reshape=True,
                transformer_options=options,
            )
            out = out.transpose(1, 2).flatten(2)
        else:
            out = attend(dense, q, k, v, HEADS, mask=mask, transformer_options=options)
        return x + self.out(out)


class VideoModel(nn.Module):
    """Patches of 1 x 2 x 2 and some blocks; no text in self-attention, but cross-attention to it."""

    patch_size = (1, 2, 2)
    split = False
    says_block = True
    blocks_of = (("double", 3),)

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(16, DIM), nn.Linear(DIM, 16)
        self.place = nn.Parameter(torch.randn(1, 192, DIM))
        self.text = nn.Linear(8, DIM)
        self.groups = nn.ModuleList(
            nn.ModuleList(Block(self.split) for _ in range(count)) for _, count in self.blocks_of
        )

    def forward(self, x: Tensor, t: Tensor, context: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        b, c, f, h, w = x.shape
        x = x.reshape(b, c, f, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6).reshape(b, -1, c * 4)
        tokens = self.into(x) + self.place + t.reshape(-1, 1, 1)
        out = self.run(tokens, self.text(context), transformer_options)
        out = self.back(out).reshape(b, f, h // 2, w // 2, c, 2, 2).permute(0, 4, 1, 2, 5, 3, 6)
        return out.reshape(b, c, f, h, w)

    def run(self, x: Tensor, text: Tensor, options: dict[str, Any]) -> Tensor:
        for (kind, count), group in zip(self.blocks_of, self.groups, strict=True):
            if self.says_block:
                options["block_type"], options["total_blocks"] = kind, count
            for index, block in enumerate(group):
                if self.says_block:
                    options["block_index"] = index
                if index in options.get("skip_blocks", {}).get(options.get("sigmas_step"), ()):
                    continue  # as a caching node does
                x = block(x, options)
                x = x + attend(dense, x, text, text, HEADS, transformer_options=options)
        return x


class WanModel(VideoModel):
    pass


class MiniTrainDIT(VideoModel):
    """Does not name its blocks, and calls attention with separate heads."""

    split = True
    says_block = False
    patch_spatial, patch_temporal = 2, 1


class HunyuanVideo(VideoModel):
    """Joint attention over [video, text] with an additive mask, double then single blocks."""

    blocks_of = (("double", 2), ("single", 2))
    text_first = False

    def run(self, x: Tensor, text: Tensor, options: dict[str, Any]) -> Tensor:
        video, order = x.shape[1], (text, x) if self.text_first else (x, text)
        mask = torch.zeros(1, 1, video + text.shape[1])
        mask[..., -2:] = torch.finfo(x.dtype).min
        mask = mask.roll(text.shape[1], -1) if self.text_first else mask
        start = text.shape[1] if self.text_first else 0
        if self.text_first:
            options["img_slice"] = [start, start + video]
        joint = torch.cat(order, 1)
        for (kind, count), group in zip(self.blocks_of, self.groups, strict=True):
            options["block_type"], options["total_blocks"] = kind, count
            for index, block in enumerate(group):
                options["block_index"] = index
                joint = block(joint, options, mask)
        return joint[:, start : start + video]


class TextFirst(HunyuanVideo):
    """Newer HunyuanVideo: text first, marked by img_slice."""

    text_first = True


class Unheard(VideoModel):
    """A joint model that the node does not know."""

    blocks_of = HunyuanVideo.blocks_of
    text_first = False
    run = HunyuanVideo.run


MODELS = {
    "wan": WanModel,
    "cosmos": MiniTrainDIT,
    "hunyuan": HunyuanVideo,
    "hunyuan, text first": TextFirst,
    "unheard": Unheard,
}


class Base:
    """The host's model around the diffusion model."""

    def __init__(self, diffusion_model: nn.Module) -> None:
        self.diffusion_model = diffusion_model


class Sampling:
    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 - percent


class Executor:
    """Calls the wrappers in turn, then the function."""

    def __init__(self, function: Any, owner: Any, wrappers: list[Any]) -> None:
        self.function, self.class_obj, self.wrappers = function, owner, wrappers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wrappers:
            return self.function(*args, **kwargs)
        rest = Executor(self.function, self.class_obj, self.wrappers[1:])
        return self.wrappers[0](rest, *args, **kwargs)


class Patcher:
    """The host's MODEL."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, dict[str, list[Any]]] = {}

    def clone(self) -> Patcher:
        twin = Patcher(self.base)
        twin.model_options = {
            key: dict(value) if isinstance(value, dict) else value for key, value in self.model_options.items()
        }
        twin.wrappers = {
            kind: {key: list(found) for key, found in keys.items()} for kind, keys in self.wrappers.items()
        }
        return twin

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)

    def get_model_object(self, name: str) -> Any:
        return {"model_sampling": Sampling(), "diffusion_model": self.base.diffusion_model}[name]

    def around(self, kind: str, function: Any, owner: Any) -> Executor:
        return Executor(function, owner, [one for found in self.wrappers.get(kind, {}).values() for one in found])


class StandIn:
    """The stand-in with the interface that `checks` expect of a host."""

    names = ("wan", "cosmos", "hunyuan", "hunyuan, text first")

    def build(self, name: str) -> Patcher:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Patcher(Base(MODELS[name]().eval()))

    def sample(
        self,
        model: Patcher,
        *,
        batched: bool = True,
        steps: int = 4,
        videos: int = 1,
        seed: int = 0,
        middle: bool = False,
        on_step: Any = None,
        options: dict[str, Any] | None = None,
    ) -> Tensor:
        """Euler steps with guidance. `batched` runs both branches as one batch; `middle` evaluates the model
        between two noise levels as well, as samplers of higher order do."""
        draw = torch.Generator().manual_seed(seed)
        frames, height, width = GRID
        noise = torch.randn(videos, 4, frames, 2 * height, 2 * width, generator=draw)
        texts = torch.randn(2, 1, 7, 8, generator=draw)
        sigmas = torch.linspace(1.0, 0.0, steps + 1)
        uuids = [uuid.uuid4(), uuid.uuid4()]

        def denoise(x: Tensor, step: int, sigma: Tensor) -> Tensor:
            found = {}
            for part in [[1, 0]] if batched else [[0], [1]]:
                call = {
                    **model.model_options["transformer_options"],
                    **(options or {}),
                    "cond_or_uncond": part,
                    "uuids": [uuids[kind] for kind in part],
                    "sigmas": sigma[None],
                    "sample_sigmas": sigmas,
                    "sigmas_step": step,
                }
                text = torch.cat([texts[kind].expand(videos, -1, -1) for kind in part])
                out = model.around("apply_model", self._apply(model), model.base)(
                    torch.cat([x] * len(part)), sigma.expand(len(part) * videos), text, transformer_options=call
                )
                found.update(zip(part, out.chunk(len(part)), strict=True))
            return found[1] + 3.0 * (found[0] - found[1])

        def outer(x: Tensor) -> Tensor:
            for step in range(steps):
                if on_step is not None:
                    on_step(step)
                now, then = sigmas[step], sigmas[step + 1]
                slope = denoise(x, step, now)
                if middle:
                    slope = denoise(x + (then - now) / 2 * slope, step, (now + then) / 2)
                x = x + (then - now) * slope
            return x

        with torch.no_grad():
            return model.around("outer_sample", outer, self)(noise)

    def _apply(self, model: Patcher) -> Any:
        def apply(x: Tensor, t: Tensor, text: Tensor, transformer_options: dict[str, Any]) -> Tensor:
            return model.base.diffusion_model(x, t, context=text, transformer_options=transformer_options)

        return apply
