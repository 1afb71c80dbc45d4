"""`torch.set_default_dtype` has no say in a call: none of its tensors takes that dtype over. The fuzzer
compares outputs; this finds the tensor, also where a rounded number decides nothing in these cases."""

import traceback
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.fuzz.cases import make
from tests.fuzz.checks import call, default_dtype
from tests.support.sampling import first_is_quick

CASES, PARTS = 160, 4


class Made(TorchDispatchMode):
    """Notes the lines of the package that make a tensor of `dtype` out of tensors of other dtypes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.lines: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._has(out) and not self._has((args, kwargs)):
            ours = [frame for frame in traceback.extract_stack() if "/residua/" in frame.filename]
            self.lines |= {f"{frame.filename}:{frame.lineno}: {frame.line}" for frame in ours[-1:]}
        return out

    def _has(self, values: Any) -> bool:
        return any(isinstance(x, torch.Tensor) and x.dtype == self.dtype for x in tree_leaves(values))


@pytest.mark.parametrize("part", first_is_quick(range(PARTS)))
def test_no_tensor_of_a_call_has_the_default_dtype(part):
    made = Made(torch.bfloat16)
    for seed in range(part, CASES, PARTS):
        case = make(seed)
        if case.dtype != torch.bfloat16:
            with default_dtype(torch.bfloat16), made:
                call(case)
    assert not made.lines, "\n".join(sorted(made.lines))
