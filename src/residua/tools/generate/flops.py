"""Counts how often a pipeline runs its transformers, and the FLOPs of a pass outside self-attention."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

COMPONENTS = ("transformer", "transformer_2")
UNITS = {"PFLOPs": 1.0, "TFLOPs": 1e3, "GFLOPs": 1e6}  # how many of them make a PFLOP


def flops_unit(pflops: Iterable[float | None]) -> tuple[str, float]:
    """The unit in which the largest of these numbers is easy to read, and its factor."""
    largest = max((value for value in pflops if value is not None), default=1.0)
    readable = (found for found in UNITS.items() if largest * found[1] >= 1)
    return next(readable, list(UNITS.items())[-1])


class Passes:
    """Counts the forward passes of the transformers."""

    def __init__(self) -> None:
        self.count = 0
        self.linear_flops: int | None = None  # matrix products and convolutions of the first pass


@contextmanager
def counted_passes(pipe: Any, with_flops: bool = False) -> Iterator[Passes]:
    """Counts the passes of the pipeline inside the block. `with_flops` slows the first pass down: use it in a
    warm-up. Attention is not included: torch counts it on some devices only, and Residua counts pairs
    itself."""
    from torch.utils.flop_counter import FlopCounterMode  # takes seconds to import

    passes = Passes()
    mode: list[FlopCounterMode] = []

    def before(*_: Any) -> None:
        passes.count += 1
        if with_flops and passes.count == 1:
            mode.append(FlopCounterMode(display=False).__enter__())

    def after(*_: Any) -> None:
        if mode:
            counter = mode.pop()
            counter.__exit__(None, None, None)
            totals = counter.get_flop_counts().get("Global", {})
            passes.linear_flops = sum(n for name, n in totals.items() if "attention" not in str(name))

    hooks = []
    for name in COMPONENTS:
        model = getattr(pipe, name, None)
        if model is not None:
            hooks.append(model.register_forward_pre_hook(before))
            hooks.append(model.register_forward_hook(after))
    try:
        yield passes
    finally:
        if mode:
            mode.pop().__exit__(None, None, None)
        for hook in hooks:
            hook.remove()
