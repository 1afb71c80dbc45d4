"""Holds a rework to "bit for bit the same": records what a matrix of calls returns, and compares with a record.

    python -m dev.safety_net record before.json
    python -m dev.safety_net compare before.json

A record holds the hash of every output, and every receipt or report. Calls go through the public API, so that an
older checkout can be recorded with its `src` first on PYTHONPATH; `--names` then translates what had another name
there: '{"torch": "portable", "generic": "portable", "residua.api:attend_route": "residua.execution:run",
"residua.method.budget:SharedBudget": "residua.budget:SharedBudget"}'.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import residua

Entry = tuple[str, Callable[[], Any]]

RECONSTRUCTIONS = ("anchored", "tail", "probe", "none")
PARTITIONS = ("response", "key-response", "semantic")
ISAS = ("avx512bf16", "avx512", "avx2", "generic")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
METHODS = ("paper", "authors", "window", "sta", "sparge", "sparge-gate", "xattention", "pisa", "svg2")
CLOCK = ("seconds", "stages", "saving", "headline", "timed_by")  # in keys of what differs from run to run
SETTINGS: dict[str, dict[str, Any]] = {
    "centroid score": {"score": "centroid"},
    "value error": {"reconstruction": "none", "score": "value-error", "budget_scope": "query-group"},
    "largest probes first": {"reconstruction": "probe", "probe_order": "largest", "metric_spacing": "even"},
    "no subspace": {"reconstruction": "probe", "subspace": False, "probe_policy": "random"},
    "uniform probes": {"probe_policy": "uniform"},
    "one slot, no drift": {"summary_slots": 1, "drift_rank": 0, "density": 0.4},
    "many slots": {"summary_slots": 12, "drift_rank": 16, "density": 0.4},
    "no probes": {"probes": 0},
    "low density": {"density": 0.02},
    "density 1": {"density": 1.0},
    "rules of a GPU": {"rules": "gpu", "density": 0.3},
    "rules of a GPU, tail": {"rules": "gpu", "density": 0.1, "reconstruction": "tail"},
}
EXTREMES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "huge": lambda q, k, v: (q * 1e18, k * 1e18, v * 1e37),
    "tiny": lambda q, k, v: (q * 1e-30, k, v * 1e-38),
    "hot": lambda q, k, v: (q * 40, k, v),
    "zero": lambda q, k, v: (q * 0, k, v),
    "equal rows": lambda q, k, v: (q[:, :, :1].expand_as(q), k, v),
    "NaN query": lambda q, k, v: (q.index_fill(2, torch.tensor([9]), math.nan), k, v),
    "NaN key": lambda q, k, v: (q, k.index_fill(2, torch.tensor([5]), math.nan), v),
    "infinite value": lambda q, k, v: (q, k, v.index_fill(3, torch.tensor([3]), math.inf)),
    "strided": lambda q, k, v: (q.mT.contiguous().mT, k.transpose(1, 2).contiguous().transpose(1, 2), v),
}


def tensors(
    tokens: int = 400,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    keys: int | None = None,
    step: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with structure: tokens around a few centres, which move a little from step to step."""
    g = torch.Generator().manual_seed(7)

    def near(centres: Tensor, count: int, own: int) -> Tensor:
        which = torch.randint(0, len(centres), (count,), generator=g)
        first, last = (torch.randn(batch, own, count, dims[0], generator=g) for _ in range(2))
        return 1.2 * centres[which] + 0.4 * (math.cos(step) * first + math.sin(step) * last)

    centres, count = torch.randn(10, dims[0], generator=g), keys or tokens
    q, k = near(centres, tokens, heads[0]), near(centres, count, heads[1])
    v = torch.randn(batch, heads[1], count, dims[1], generator=g) + k.mean(-1, keepdim=True)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def digest(x: Tensor) -> str:
    """A hash of shape, dtype and bits."""
    raw = x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return "#" + hashlib.sha256(f"{list(x.shape)} {x.dtype}".encode() + raw).hexdigest()[:16]


class Names(dict[str, str]):
    """What an older checkout calls things; whatever is not in it has its name of today."""

    def __missing__(self, name: str) -> str:
        return name

    def load(self, address: str) -> Any:
        """What `module:name` stands for."""
        module, name = self[address].split(":")
        return getattr(importlib.import_module(module), name)


def calls(
    config: dict[str, Any],
    budget: Callable[[], Any],
    steps: int = 1,
    layers: int = 1,
    isa: str | None = None,
    change: Callable[[Tensor, Tensor, Tensor], Any] = lambda *given: given,
    recipe: dict[str, Any] | None = None,
    **options: Any,
) -> list[Any]:
    """What every call of a run returns. Each layer has a state of its own; all share one budget."""
    shared, found = budget() if layers > 1 else None, []
    states = [residua.State(shared) for _ in range(layers)]
    with mock.patch.dict(os.environ, {"RESIDUA_NATIVE_ISA": isa} if isa else {}):
        for number in range(steps * layers):
            step, layer = divmod(number, layers)
            q, k, v = change(*tensors(step=0.02 * step + 0.4 * layer, **(recipe or {})))
            state = states[layer] if steps > 1 else None
            out, receipt = residua.attention(q, k, v, residua.Config(**config), state, return_receipt=True, **options)
            rows = receipt.probe_rows
            found.append([digest(out), None if rows is None else digest(rows), receipt.to_dict()])
    return found


def call_entries(names: Names) -> Iterator[Entry]:
    """Every combination that has code of its own, each as small as it can be."""

    def entry(name: str, backend: str, config: dict[str, Any], **rest: Any) -> Entry:
        config, budget = {**config, "backend": names[backend]}, names.load("residua.method.budget:SharedBudget")
        return f"{name}, {backend}", partial(calls, config, budget, **rest)

    for one in RECONSTRUCTIONS:
        wanted = {"reconstruction": one}
        yield entry(one, "reference", {**wanted, "kmeans_cold": 5})
        for label, dtype in DTYPES.items():
            yield entry(f"{one}, {label}", "torch", wanted, recipe={"dtype": dtype, "dims": (24, 40)})
            for isa in ISAS if label != "fp64" else ():
                recipe = {"dtype": dtype, "dims": (40, 56)}
                yield entry(f"{one}, {label}, {isa}", "native", wanted, isa=names[isa], recipe=recipe)
    end, mask = [(380, 400)], torch.arange(400)[None] < 391
    for backend in ("torch", "native"):
        for one in RECONSTRUCTIONS:
            wanted = {"reconstruction": one}
            text = {"pinned_keys": end, "exact_queries": end, "key_mask": mask}
            yield entry(f"{one}, text and padding", backend, wanted, steps=2, **text)
            for partition in PARTITIONS:
                yield entry(f"{one}, {partition}", backend, {**wanted, "partition": partition}, steps=2)
        for name, change in EXTREMES.items():
            yield entry(name, backend, {}, change=change)
        for name, settings in SETTINGS.items():
            yield entry(name, backend, settings)
        some = {"density": 0.3, "kmeans_cold": 5}
        yield entry("batch of 2, no shared heads", backend, some, recipe={"heads": (2, 2), "batch": 2})
        yield entry("fewer keys, scale", backend, some, recipe={"keys": 150}, scale=0.1)
        yield entry("ten steps", backend, some, steps=10)
        yield entry("error bound", backend, {**some, "max_error": 0.04}, steps=4)
        yield entry("balance, two layers", backend, {**some, "balance": True}, steps=4, layers=2)
        yield entry("balance, bound", backend, {**some, "balance": True, "max_error": 0.03}, steps=4, layers=2)
    yield entry("4,096 tokens", "native", {"density": 0.1}, steps=2, recipe={"tokens": 4096, "dims": (64, 64)})
    small = {"query_groups": 5, "kv_groups": 11, "kmeans_cold": 2, "probes": 8, "density": 0.4}
    for label, one in (("fp32", "anchored"), ("fp16", "anchored"), ("fp32", "probe")):
        recipe = {"tokens": 90, "heads": (2, 1), "dtype": DTYPES[label]}
        yield entry(f"{one}, {label}", "triton", {**small, "reconstruction": one}, recipe=recipe)


def other_entries(names: Names) -> Iterator[Entry]:
    """The other doors: torch's signature, the raw operator, pipelines, other methods, the model in the box."""

    def sdpa() -> str:
        return digest(residua.sdpa(*tensors(), attn_mask=torch.arange(400)[None, None, None] < 390, enable_gqa=True))

    def raw(backend: str) -> list[str]:
        g = torch.Generator().manual_seed(0)
        query = residua.Partition.from_labels(torch.randint(-1, 6, (1, 4, 400), generator=g), 6)
        kv = residua.Partition.from_labels(torch.randint(-1, 9, (1, 2, 400), generator=g), 9)
        route = residua.Route(query, kv, torch.rand(1, 4, 6, 9, generator=g) < 0.4)
        attend = names.load("residua.api:attend_route")
        return [digest(x) for x in attend(*tensors(), route, backend=names[backend])]

    def accelerated(pipe: Any, run: Callable[[], Tensor], settings: dict[str, Any]) -> list[Any]:
        with residua.accelerate(pipe, min_tokens=0, **settings) as handle:
            return [digest(run()), json.loads(handle.report().to_json())]

    def tiny(name: str, **settings: Any) -> list[Any]:
        from tests.support import tiny_pipelines

        pipeline = tiny_pipelines.build(name)
        return accelerated(pipeline.pipe, lambda: pipeline(4), settings)

    def world(**settings: Any) -> list[Any]:
        from residua.world import load_pipeline

        pipe: Any = load_pipeline()
        prompt = "a red rubber ball thrown right on a sand floor at noon"
        pipe.set_progress_bar_config(disable=True)
        size = {"height": 32, "width": 32, "num_frames": 12, "num_inference_steps": 2, "output_type": "pt"}
        noise = torch.Generator().manual_seed(1)
        return accelerated(pipe, lambda: pipe(prompt, generator=noise, **size).frames, {"dense_steps": 0, **settings})

    yield "sdpa", sdpa
    for backend in ("torch", "native", "reference", "triton"):
        yield f"raw operator, {backend}", partial(raw, backend)
    for name in ("wan", "hunyuan", "ltx"):
        yield f"{name}, density", partial(tiny, name, density=0.3, dense_steps=1)
        yield f"{name}, quality", partial(tiny, name, quality="balanced")
    for method in (*METHODS, "svg2-budget", "svoo", "svg-ear"):
        yield f"method {method}", partial(tiny, "wan", method=method, dense_steps=1, dense_layers=0)
    yield "world, density", partial(world, density=0.15, dense_layers=0)
    yield "world, quality", partial(world, quality="balanced")


def record(names: Names, only: str = "") -> dict[str, Any]:
    """The results of all entries whose name contains `only`; of a call that raises, the error."""
    threads, found = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        for name, run in [*call_entries(names), *other_entries(names)]:
            if only in name:
                torch.manual_seed(0)
                try:
                    found[name] = run()
                except Exception as error:
                    found[name] = f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(threads)
    return json.loads(json.dumps(found))  # lists for tuples, as in a file


def leaves(x: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value with its path, but for those that depend on the clock."""
    if path.endswith("/notes") and isinstance(x, dict):
        x = list(x)  # texts, with how often they came
    inside = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    if not inside:
        yield path, x
    for key, value in inside:
        if not any(word in str(key) for word in CLOCK):
            yield from leaves(value, f"{path}/{key}")


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[dict[str, list[str]], Counter[str]]:
    """What differs: the values of each entry, by its name; and how often a key or a text has another name."""
    wrong: dict[str, list[str]] = {}
    renamed: Counter[str] = Counter()
    for name in before:
        if name not in after:
            wrong[name] = ["is gone"]
            continue
        old, new, found = dict(leaves(before[name])), dict(leaves(after[name])), []
        for path in old.keys() & new.keys():
            if old[path] != new[path]:
                text = all(isinstance(x, str) and not x.startswith("#") for x in (old[path], new[path]))
                line = f"{old[path]!r} -> {new[path]!r}"
                renamed.update([line]) if text else found.append(f"{path} {line}")
        gained = {path: x for path, x in new.items() if path not in old}
        for path, value in ((path, x) for path, x in old.items() if path not in new):
            now = next((key for key, x in gained.items() if repr(x) == repr(value)), None)
            if now is None and not isinstance(value, str):
                found.append(f"{path} {value!r} is gone")
            renamed[f"key {path.split('/')[-1]} -> {now.split('/')[-1] if now else 'nothing'}"] += 1
            gained = {key: x for key, x in gained.items() if key != now}
        renamed.update(f"new key {path.split('/')[-1]}" for path in gained)
        if found:
            wrong[name] = sorted(found)
    renamed.update(f"new entry {name}" for name in after if name not in before)
    return wrong, renamed


def main() -> int:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--names", type=json.loads, default={}, help="names of an older checkout, as JSON")
    parser.add_argument("--only", default="", help="entries whose name contains this")
    asked = parser.parse_args()
    now = record(Names(asked.names), asked.only)
    if asked.command == "record":
        asked.file.write_text(json.dumps(now, indent=0))
        return 0
    before = {name: x for name, x in json.loads(asked.file.read_text()).items() if asked.only in name}
    wrong, renamed = compare(before, now)
    for name, found in wrong.items():
        print(f"DIFFERS {name}: {len(found)} values, such as {found[0][:300]}")
    for text, count in renamed.items():
        print(f"renamed {text} ({count} times)")
    print(f"{len(before)} entries, {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
