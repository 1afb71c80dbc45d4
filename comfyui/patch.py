"""Attaches Residua to a ComfyUI model: an attention override, and two wrappers that track the sampling."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from residua.hosts import Grid, HostAttention, Pass, Report, ResolvedSettings, Site, make_report, noise_removed

from .tokens import latent_grid, tokens_of

logger = logging.getLogger("residua.comfyui")

KEY = "residua"
OVERRIDE = "optimized_attention_override"
# The values of comfy.patcher_extension.WrappersMP; not imported, so that this file needs no ComfyUI.
APPLY_MODEL, OUTER_SAMPLE = "apply_model", "outer_sample"

OUTSIDE = "outside of start and end percent"
UNKNOWN = "video tokens unknown"

Dense = Callable[..., Tensor]


class Patch:
    """What the node puts on a clone of the model.

    Args:
        settings: How it is accelerated.
        sigmas: (highest, lowest) noise level at which calls may be sparse.
        on_error: "stop" raises when a sparse call fails, "dense" computes it dense and warns.
        before: The attention override that was there before; it computes the dense calls.
    """

    def __init__(
        self,
        settings: ResolvedSettings,
        sigmas: tuple[float, float],
        on_error: Any = "stop",
        before: Dense | None = None,
    ) -> None:
        self.host = HostAttention(settings, name="model", family="ComfyUI", unsupported="dense", on_error=on_error)
        self.sigmas = sigmas
        self.before = before
        self.runs = 0
        self._model: Any = None
        self._layers: dict[tuple[str, int, int], int] = {}
        self._doubles = 0  # number of double blocks, which come before the single ones
        self._said: set[str] = set()
        self._mask: tuple[Any, Tensor | None] = (None, None)
        self._sampling = False
        self._forget_run()

    def _forget_run(self) -> None:
        self._sigma = math.inf
        self._now = Pass(run=self.runs)
        self._calls: Counter[tuple[str, int]] = Counter()  # self-attention calls of each block
        self._passes: Counter[tuple[int, str]] = Counter()  # forward passes of a branch in each step
        self._names: dict[Any, str] = {}  # uuid of a conditioning -> branch

    def report(self) -> Report:
        """What happened in the last sampling run."""
        return make_report([self.host])

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrapper of a whole sampling run: however it ends, nothing is carried into the next one."""
        self.host.reset()
        self.host.clear()
        self.runs += 1
        self._forget_run()
        self._sampling = True
        try:
            return executor(*args, **kwargs)
        finally:
            self._sampling = False
            self.host.reset()
            self._mask = (None, None)

    def apply_model(self, executor: Any, x: Tensor, t: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Wrapper of one forward pass: reads step and branches once, for all of its attention calls."""
        options = kwargs.get("transformer_options") or next(
            (value for value in reversed(args) if isinstance(value, dict)), {}
        )
        base = getattr(executor, "class_obj", None)
        self._model = getattr(base, "diffusion_model", None)
        # Nodes for torch.compile wrap the model.
        self._model = getattr(self._model, "_orig_mod", self._model)
        self._calls.clear()
        self._now = self._locate(options, latent_grid(self._model, x))
        return executor(x, t, *args, **kwargs)

    def _locate(self, options: dict[str, Any], grid: Grid | None) -> Pass:
        step, steps, removed = self._now.step, self._now.steps, self._now.removed
        schedule, now = options.get("sample_sigmas"), options.get("sigmas")
        if now is not None:
            self._sigma = float(now.flatten()[0])  # waits for the device, once per forward pass
        if schedule is not None and now is not None:
            levels = schedule.tolist()
            steps = max(1, len(levels) - 1)
            # a budget can only be moved between steps if all of them are sparse
            within = self.sigmas[1] <= min(levels[:-1], default=0) and max(levels) <= self.sigmas[0]
            removed = noise_removed(levels) if within else ()
            # A sampler may also evaluate between two levels: that counts as the step above.
            reached = sum(level >= self._sigma * (1 - 1e-4) for level in levels)
            step = min(max(0, reached - 1), steps - 1)
        kinds = options.get("cond_or_uncond") or [0]
        uuids = options.get("uuids") or list(range(len(kinds)))
        named = [self._branch(uuid, kind) for uuid, kind in zip(uuids, kinds, strict=True)]
        # The same conditioning may come twice in a step (context windows, higher-order samplers): each gets a
        # state.
        for index, name in enumerate(named):
            self._passes[step, name] += 1
            count = self._passes[step, name]
            named[index] = name if count == 1 else f"{name} ({count})"
        return Pass(step, steps, tuple(named) if len(named) > 1 else named[0], self.runs, grid, removed)

    def _branch(self, uuid: Any, kind: int) -> str:
        if uuid not in self._names:
            word = "cond" if kind == 0 else "uncond" if kind == 1 else f"cond {kind}"
            same = sum(name.split(" #")[0] == word for name in self._names.values())
            self._names[uuid] = word if not same else f"{word} #{same + 1}"
        return self._names[uuid]

    @torch.compiler.disable
    def __call__(
        self,
        func: Dense,
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
        """The attention override: [B, N, H * D] in and out, or [B, H, N, D] if the flags say so."""

        def dense() -> Tensor:
            given = (q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape)
            return func(*given, **more) if self.before is None else self.before(func, *given, **more)

        tokens_at = 2 if skip_reshape else 1
        options = more.get("transformer_options") or {}
        if q.shape[tokens_at] != k.shape[tokens_at] or not self._sampling:
            return dense()  # cross-attention, or a forward pass outside of sampling
        found = tokens_of(self._model, self._now.grid, options, q.shape[tokens_at])
        if found is None:
            return dense()  # self-attention of the text
        split = [x if skip_reshape else _heads_first(x, q.shape[-1] // heads) for x in (q, k, v)]
        site, reason = self._site(options, found), None
        if found.unknown:
            reason = UNKNOWN
            self._say_once(f"{found.unknown}: its attention stays dense")
        elif not self.sigmas[1] <= self._sigma <= self.sigmas[0]:
            reason = OUTSIDE
        out = self.host.call(
            *split,
            site,
            lambda: _as_heads(dense(), heads, skip_output_reshape),
            mask=self._padding(mask, q.shape[0]),
            scale=more.get("scale"),
            why_dense=reason,
        )
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    def _site(self, options: dict[str, Any], found: Any) -> Site:
        kind, index = str(options.get("block_type", "block")), options.get("block_index")
        if index is None:
            self._say_once(
                "this model does not say which block runs: blocks are told apart by the order of their "
                "calls, so nodes that skip blocks make the warm start worse"
            )
            kind, index = "call", self._calls["call", 0]
            self._calls["call", 0] += 1
            nth = 0
        else:
            index = int(index)
            nth = self._calls[kind, index]
            self._calls[kind, index] += 1
        if kind == "double" and options.get("total_blocks"):
            self._doubles = int(options["total_blocks"])
        depth = index + (self._doubles if kind == "single" else 0)
        layer = self._layers.setdefault((kind, index, nth), len(self._layers))
        name = f"{kind} {index}" if not nth else f"{kind} {index}, call {nth + 1}"
        now = self._now if found.grid == self._now.grid else replace(self._now, grid=found.grid)
        return Site(layer, now, found.text, found.text, depth, name)

    def _padding(self, mask: Tensor | None, batch: int) -> Tensor | None:
        """ComfyUI adds masks to the scores; a mask that only switches keys off becomes boolean key
        padding."""
        if mask is None or mask.dtype is torch.bool or mask.shape[-2] != 1:
            return mask
        if self._mask[0] is not mask:
            off = mask <= -1e4
            # Reading it waits for the device, so the result is kept: the blocks of a forward pass share one
            # mask.
            only_padding = bool((off | (mask == 0)).all())
            self._mask = (mask, ~off.reshape(-1, mask.shape[-1]) if only_padding else None)
        valid = self._mask[1]
        return mask if valid is None or valid.shape[0] not in (1, batch) else valid

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)


def _heads_first(x: Tensor, dim: int) -> Tensor:
    return x.unflatten(-1, (-1, dim)).transpose(1, 2)  # [B, H, N, D]


def _as_heads(out: Tensor, heads: int, split: bool) -> Tensor:
    return out if split else out.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, H, N, D]


def patched(model: Any, settings: ResolvedSettings, sigmas: tuple[float, float], on_error: str = "stop") -> Any:
    """A clone of a ComfyUI model with Residua attached; the model itself is not changed.

    An attention override that is already there is kept: it computes the dense calls. An earlier Residua is
    replaced.
    """
    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    before = options.get(OVERRIDE)
    if isinstance(before, Patch):
        before = before.before
        for kind in (APPLY_MODEL, OUTER_SAMPLE):
            clone.remove_wrappers_with_key(kind, KEY)
    patch = Patch(settings, sigmas, on_error, before)
    options[OVERRIDE] = patch
    options[KEY] = patch  # for the report, because a later override may hide ours
    clone.add_wrapper_with_key(APPLY_MODEL, KEY, patch.apply_model)
    clone.add_wrapper_with_key(OUTER_SAMPLE, KEY, patch.outer_sample)
    return clone


def patch_of(model: Any) -> Patch | None:
    """The patch that `patched` attached to the model, or None."""
    found = model.model_options.get("transformer_options", {}).get(KEY)
    return found if isinstance(found, Patch) else None
