"""Run by test_ulysses.py, once per rank: context parallelism on CPU processes. Prints one JSON line on
rank 0."""

import inspect
import json
import sys

import conftest
import diffusers
import torch
import torch.distributed as dist

from residua import IntegrationError, accelerate
from tests.support import tiny_models as tiny

STEPS = 3


HEADS = {"wan": 4, "wan, 3 heads": 3}


def build(name: str):
    with torch.random.fork_rng():
        model, inputs = tiny.settled(tiny.wan(heads=HEADS[name]) if name in HEADS else tiny.ltx())
    if name == "ltx":
        inputs["encoder_attention_mask"] = None  # diffusers does not split the heads of this mask
    return model, inputs


def sparse(model, scheduler):
    return accelerate(
        model, 0.22, config=conftest.TINY, dense_steps=1, dense_layers=0, min_tokens=0, scheduler=scheduler
    )


def compare(name: str, order: str, **degrees: object) -> dict[str, object]:
    """Largest difference between two ranks and one process, and the shapes that a rank saw."""
    scheduler = conftest.FakeScheduler()
    model, inputs = build(name)
    handle = sparse(model, scheduler)
    alone = conftest.run(model, inputs, scheduler, STEPS)
    handle.remove()
    model, inputs = build(name)
    parallel = diffusers.ContextParallelConfig(**degrees)
    if order == "parallel first":
        model.enable_parallelism(config=parallel)
    handle = sparse(model, scheduler)
    if order == "sparse first":
        model.enable_parallelism(config=parallel)
    out = conftest.run(model, inputs, scheduler, STEPS)
    total = handle.report().total
    handle.remove()
    after = conftest.run(model, inputs, scheduler, 1)
    return {
        "difference": float((out - alone).abs().max()),
        "sparse": total.sparse,
        "dense": total.dense,
        "shapes": total.shapes,
        "density": total.density,
        "finite_after": bool(after.isfinite().all()),
    }


def uneven() -> dict[str, object] | None:
    if "ulysses_anything" not in inspect.signature(diffusers.ContextParallelConfig).parameters:
        return None  # an older diffusers
    return compare("wan, 3 heads", "parallel first", ulysses_degree=2, ulysses_anything=True)


def refused(order: str) -> str:
    scheduler = conftest.FakeScheduler()
    model, inputs = build("wan")
    ring = diffusers.ContextParallelConfig(ring_degree=2)
    try:
        if order == "parallel first":
            model.enable_parallelism(config=ring)
        handle = sparse(model, scheduler)
        model.enable_parallelism(config=ring)
        conftest.run(model, inputs, scheduler, 1)
    except IntegrationError as error:
        if order == "sparse first":
            handle.remove()
        return str(error)
    return "not refused"


def main() -> None:
    dist.init_process_group("gloo")
    # Without an accelerator, diffusers divides by its count of devices, which is 0.
    torch.accelerator.device_count = lambda: 1
    results: dict[str, object] = {
        "wan, parallel first": compare("wan", "parallel first", ulysses_degree=2),
        "wan, sparse first": compare("wan", "sparse first", ulysses_degree=2),
        "ltx": compare("ltx", "parallel first", ulysses_degree=2),
        "wan, 3 heads": uneven(),
        "ring, parallel first": refused("parallel first"),
        "ring, sparse first": refused("sparse first"),
    }
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
