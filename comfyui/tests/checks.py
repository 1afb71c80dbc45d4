"""What must hold on every host: the stand-in in CI, and a real ComfyUI with `real.py`.

A host has `build(name)`, which returns a MODEL, and `sample(model, batched=..., steps=..., videos=...)`,
which returns latents.
"""

from dataclasses import replace
from typing import Any

import torch
from residua_comfyui.patch import patch_of, patched
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from residua import Config
from residua.hosts import ResolvedSettings

TINY = Config(
    query_groups=8, kv_groups=24, probes=6, kmeans_cold=4, metric_rows=64, key_rank=8, query_rank=8, density=0.22
)
EVERYWHERE = (1e9, -1.0)  # noise levels


def sparse(model: Any, density: float = 0.22, **changes: Any) -> Any:
    """The model with Residua attached, with settings under which a tiny video is routed."""
    settings = {"min_tokens": 0, **changes}
    sigmas, on_error = settings.pop("sigmas", EVERYWHERE), settings.pop("on_error", "stop")
    return patched(model, ResolvedSettings(TINY.replace(density=density), **settings), sigmas, on_error)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


class EntryByEntry(TorchFunctionMode):
    """The host's own layers, one batch entry at a time.

    Products and activations of torch round differently with what stands beside a row, so a host gives
    attention slightly different tensors if it runs both guidance branches as one batch. Here it does not.
    """

    LAYERS = (
        functional.linear,
        functional.conv3d,
        functional.scaled_dot_product_attention,
        functional.layer_norm,
        functional.rms_norm,
        functional.silu,
        functional.gelu,
        torch.sigmoid,
        torch.tanh,
        torch.matmul,
        torch.Tensor.matmul,
        torch.bmm,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, size = kwargs or {}, args[0].shape[0] if func in self.LAYERS else 1
        if size < 2:
            return func(*args, **kwargs)

        def at(x: Any, entry: int) -> Any:
            """The entry of whatever has a batch; weights and shapes have none."""
            batched = isinstance(x, torch.Tensor) and x.ndim == args[0].ndim and x.shape[0] == size
            return x[entry : entry + 1] if batched else x

        parts = [func(*(at(x, i) for x in args), **{name: at(x, i) for name, x in kwargs.items()}) for i in range(size)]
        return torch.cat(parts)


def recorded(host: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """Records the sparse calls of a host from now on: (step, layer) -> branch -> its arguments."""
    calls: dict[tuple[int, int], dict[str, Any]] = {}
    sparse_call = host._sparse

    def noted(q: Any, k: Any, v: Any, site: Any, mask: Any, scale: Any) -> Any:
        out = sparse_call(q, k, v, site, mask, scale)
        if len(site.now.branches) == 1:  # a batch of several calls this once for each
            calls.setdefault((site.now.step, site.layer), {})[site.now.branches[0]] = (q, k, v, mask, site, scale, out)
        return out

    host._sparse = noted
    return calls


def replayed_as_a_batch(host: Any, calls: dict[tuple[int, int], dict[str, Any]]) -> float:
    """Repeats the same calls on a fresh host with all branches in one batch; the largest relative
    difference."""
    assert calls and all(len(branches) > 1 for branches in calls.values())
    largest = 0.0
    for branches in (calls[at] for at in sorted(calls)):
        q, k, v, mask, _, _, wanted = (list(column) for column in zip(*branches.values(), strict=True))
        site, scale = next((given[4], given[5]) for given in branches.values())
        out = host.call(
            torch.cat(q),
            torch.cat(k),
            torch.cat(v),
            replace(site, now=replace(site.now, branch=tuple(branches))),
            lambda: None,
            mask=None if mask[0] is None else torch.cat(mask),
            scale=scale,
        )
        largest = max(largest, apart(out, torch.cat(wanted)))
    return largest


def check_model(host: Any, name: str) -> dict[str, Any]:
    """All checks of one model; raises AssertionError. Returns figures to print."""
    model = host.build(name)
    dense = host.sample(model)
    keep = sparse(model, 1.0)
    same = apart(host.sample(keep), dense)
    total = patch_of(keep).report().total
    assert total.sparse > 0, total.dense
    assert same <= 1e-5, f"keep everything differs from dense by {same:.1e}"

    low = sparse(model)
    batched = host.sample(low)
    first = patch_of(low).report()
    assert first.total.sparse > 0 and 0 < first.total.density < 0.5
    differs = apart(batched, dense)
    assert differs > 1e-4, "sparse equals dense"
    again = host.sample(low)
    assert torch.equal(again, batched), "a second run is not like the first: something was carried over"

    calls = recorded(patch_of(low).host)
    split = host.sample(low, batched=False)
    second = patch_of(low).report()
    together = replayed_as_a_batch(patch_of(sparse(model)).host, calls)
    assert together == 0, f"the same tensors in a batch and alone differ by {together:.1e}"
    assert (first.total.sparse, first.total.warm) == (second.total.sparse, second.total.warm)
    with EntryByEntry():
        exactly = apart(host.sample(low, batched=False), host.sample(low))
        alike = apart(host.sample(model, batched=False), host.sample(model))
    # Equal tensors are promised to give equal results; if a layer of the host that `EntryByEntry` does not
    # know makes even dense runs differ, whole runs say nothing about us.
    assert exactly == 0 or alike > 0, f"split and batched guidance differ by {exactly:.1e}"
    # What the host's own rounding makes of it: where two centres of groups are equally near to a token, it
    # can decide. The differences are printed, with those of dense runs beside them.
    between, floor = apart(split, batched), apart(host.sample(model, batched=False), dense)

    assert torch.equal(host.sample(model), dense), "the model without the node is not what it was"
    return {
        "keep everything": same,
        "sparse": differs,
        "same calls batched": together,
        "split - batched, layers entry by entry": exactly,
        "split - batched, layers entry by entry, dense": alike,
        "split - batched": between,
        "split - batched, dense": floor,
        "report": first,
    }


def tipped(host: Any, name: str, seeds: int) -> list[float]:
    """How far split and batched guidance are apart with other noise, for each seed."""
    low = sparse(host.build(name))
    return [apart(host.sample(low, batched=False, seed=n), host.sample(low, seed=n)) for n in range(seeds)]
