"""A pytest plugin (`-p sanitizer`): every address that a kernel touches in the interpreter is held against
the tensors it was given, and against what other programs of the same launch read and write.

An access out of bounds is counted and not carried out.

Programs of a launch run at the same time on a GPU. Two that write one address, or one that reads what another
writes, are a race, whatever order the interpreter happens to run them in.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

NOBODY, SEVERAL = 0, -1  # instead of the number of a program


class Sanitizer:
    """What the running launch may touch, and what its programs have touched."""

    def __init__(self) -> None:
        self.findings: Counter[str] = Counter()
        self.addresses = 0
        self.programs: dict[Any, int] = {}
        self.begin("", [])

    def begin(self, kernel: str, tensors: list[Any]) -> None:
        self.kernel = kernel
        spans = np.array(sorted(_span(t) for t in tensors) or [(0, 0)], np.int64)
        self.lows, self.highs = spans[:, 0], np.maximum.accumulate(spans[:, 1])
        # Tensors that overlap share a stretch of memory; all stretches together are numbered byte by byte.
        first = np.append(True, self.lows[1:] > self.highs[:-1])
        stretch = first.cumsum() - 1
        starts, ends = self.lows[first], self.highs[np.append(first[1:], True)]
        before = (ends - starts).cumsum() - (ends - starts)
        self.shifts = (starts - before)[stretch]
        self.programs.clear()
        self.writer, self.reader = np.zeros((2, int((ends - starts).sum())), np.int32)

    def load(self, program: Any, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which of the addresses are inside a tensor of the launch."""
        inside, at = self._places("reads", addresses, size)
        me = self._number(program)
        self._judge("reads what another program writes", at, self.writer, me)
        known = self.reader[at]
        self.reader[at] = np.where((known == NOBODY) | (known == me), me, SEVERAL)
        return inside

    def store(self, program: Any, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which of the addresses are inside a tensor of the launch."""
        inside, at = self._places("writes", addresses, size)
        me = self._number(program)
        self._judge("two programs write one address", at, self.writer, me)
        self._judge("writes what another program reads", at, self.reader, me)
        self.writer[at] = me
        return inside

    def change(self, program: Any, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which of the addresses of an atomic operation are inside a tensor of the launch."""
        return self._places("changes", addresses, size)[0]

    def _places(self, what: str, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Which addresses are inside of a tensor, and the numbers of those bytes."""
        self.addresses += addresses.size
        # Of the tensors that begin at or before an address, the end that reaches farthest.
        tensor = self.lows.searchsorted(addresses, "right") - 1
        inside = (tensor >= 0) & (addresses + size <= self.highs[tensor])
        if inside.all():
            return inside, addresses - self.shifts[tensor]
        self.findings[f"{self.kernel}: {what} out of bounds"] += int((~inside).sum())
        return inside, (addresses - self.shifts[tensor])[inside]

    def _number(self, program: Any) -> int:
        return self.programs.setdefault(program, len(self.programs) + 1)

    def _judge(self, what: str, at: np.ndarray, others: np.ndarray, me: int) -> None:
        known = others[at]
        met = (known != NOBODY) & (known != me)
        if met.any():
            self.findings[f"{self.kernel}: {what}"] += len(np.unique(at[met]))


def _span(tensor: Any) -> tuple[int, int]:
    """First and last address of a strided tensor."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _touched(pointers: Any, mask: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """All addresses of an access, which of them are live, and the bytes of each."""
    addresses = np.asarray(pointers.data).astype(np.int64)
    live = np.broadcast_to(np.asarray(mask.data), addresses.shape).astype(bool)
    return addresses, live, np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize


def install(found: Sanitizer) -> None:
    """Puts the sanitizer between the interpreter and memory."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, prepare = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    change = builder.create_atomic_rmw

    def prepared(self: Any, args: Any, kwargs: Any) -> Any:
        host = prepare(self, args, kwargs)
        tensors = [x for x in (*host[0], *host[1].values()) if hasattr(x, "data_ptr")]
        found.begin(self.fn.__name__, [interpreter._unwrap_tensor(x) for x in tensors])
        return host

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, _checked(self, found.load, pointers, mask), *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, _checked(self, found.store, pointers, mask), *rest)

    def changed(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        # what atomics meet of each other is no race; where they write is checked all the same
        return change(self, operation, pointers, value, _checked(self, found.change, pointers, mask), *rest)

    executor._init_args_hst = prepared
    builder.create_masked_load, builder.create_masked_store = loaded, stored
    builder.create_atomic_rmw = changed


def _checked(builder: Any, check: Any, pointers: Any, mask: Any) -> Any:
    """The mask without what lies out of bounds."""
    addresses, live, size = _touched(pointers, mask)
    inside = check(builder.grid_idx, addresses[live], size)
    if inside.all():
        return mask
    live = live.copy()
    live[live] = inside
    return interpreter.TensorHandle(live.reshape(np.asarray(mask.data).shape), mask.dtype)


FOUND = Sanitizer()
install(FOUND)


@pytest.fixture
def sanitizer() -> Sanitizer:
    """For tests that seed a fault: a fresh count, not part of the verdict."""
    fresh = Sanitizer()
    kept = dict(vars(FOUND))
    vars(FOUND).update(vars(fresh))
    yield FOUND
    vars(FOUND).update(kept)


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    if FOUND.findings:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"sanitizer: {FOUND.addresses:,} addresses, findings: {dict(FOUND.findings)}")
