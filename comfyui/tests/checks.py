"""What must hold on every host: the stand-in in CI, and a real ComfyUI with `real.py`.

A host has `build(name)`, which gives a MODEL, and `sample(model, batched=..., steps=..., videos=...)`, which
gives latents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from residua_comfyui.patch import patch_of, patched

from residua import Config
from residua.integration import Settings

TINY = Config(
    query_groups=8, kv_groups=24, probes=6, kmeans_cold=4, metric_rows=64, key_rank=8, query_rank=8,
    density=0.22,
)  # fmt: skip
EVERYWHERE = (1e9, -1.0)  # noise levels


def sparse(model: Any, density: float = 0.22, **changes: Any) -> Any:
    """The model with Residua on it, with settings that make a tiny video worth routing."""
    settings = {"min_tokens": 0, **changes}
    sigmas, on_error = settings.pop("sigmas", EVERYWHERE), settings.pop("on_error", "stop")
    return patched(model, Settings(TINY.replace(density=density), **settings), sigmas, on_error)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def recorded(host: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """Notes the sparse calls that a host makes from now on: (step, layer) -> branch -> its arguments."""
    calls: dict[tuple[int, int], dict[str, Any]] = {}
    part = host._sparse_part

    def noted(q: Any, k: Any, v: Any, site: Any, branch: str, valid: Any, *rest: Any) -> Any:
        out = part(q, k, v, site, branch, valid, *rest)
        calls.setdefault((site.step, site.layer), {})[branch] = (q, k, v, valid, site, rest[-1], out)
        return out

    host._sparse_part = noted
    return calls


def replayed_as_a_batch(host: Any, calls: dict[tuple[int, int], dict[str, Any]]) -> float:
    """Gives a fresh host the same tensors with all branches in one batch; the largest relative difference."""
    assert calls and all(len(branches) > 1 for branches in calls.values())
    largest = 0.0
    for branches in (calls[at] for at in sorted(calls)):
        q, k, v, valid, _, _, wanted = (list(column) for column in zip(*branches.values(), strict=True))
        site, scale = next((given[4], given[5]) for given in branches.values())
        out = host.call(
            torch.cat(q), torch.cat(k), torch.cat(v), replace(site, branch=tuple(branches)), lambda: None,
            mask=None if valid[0] is None else torch.cat(valid), scale=scale,
        )  # fmt: skip
        largest = max(largest, apart(out, torch.cat(wanted)))
    return largest


def check_model(host: Any, name: str) -> dict[str, Any]:
    """All checks of one model; raises AssertionError. Returns figures to show."""
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
    assert together <= 1e-6, f"the same tensors in a batch and alone differ by {together:.1e}"
    # Whole runs are not compared: batched and split products round differently, and where two choices are
    # nearly equal (a group, a cell) that can decide between them. The difference is shown.
    between = apart(split, batched)
    assert (first.total.sparse, first.total.warm) == (second.total.sparse, second.total.warm)

    assert torch.equal(host.sample(model), dense), "the model without the node is not what it was"
    return {
        "keep everything": same,
        "sparse": differs,
        "same calls batched": together,
        "split - batched": between,
        "report": first,
    }
