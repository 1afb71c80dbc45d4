"""A pytest plugin (`-p once`): what Triton's interpreter repeats without need is done once.

At every call of a helper it replaces the functions of `triton.language` by those that are there since the
launch, and at every operation it makes its table of types anew: a third of its time.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_per_launch() -> None:
    executor, launch, patch = (interpreter.GridExecutor, interpreter.GridExecutor.__call__, interpreter._patch_lang)
    patched: set[str] = set()  # modules

    def launched(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        return launch(self, *arguments, **options)

    def patch_once(function: Any) -> Any:
        names = {x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core}
        if names and names <= patched:
            return None  # the launch, which comes first, takes back what it has patched; nothing else does
        patched.update(names)
        return patch(function)

    executor.__call__, interpreter._patch_lang = launched, patch_once


def look_types_up_once() -> None:
    look_up, known = interpreter._get_np_dtype, {}

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter._get_np_dtype = numpy_type


patch_once_per_launch()
look_types_up_once()
