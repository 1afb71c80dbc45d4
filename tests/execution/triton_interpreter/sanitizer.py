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


class Sanitizer:
    """What the running launch may touch, and what its programs have touched."""

    def __init__(self) -> None:
        self.findings: Counter[str] = Counter()
        self.addresses = 0
        self.kernel, self.spans = "", np.zeros((0, 2), np.int64)
        self.writer: dict[int, Any] = {}
        self.reader: dict[int, Any] = {}

    def begin(self, kernel: str, tensors: list[Any]) -> None:
        self.kernel = kernel
        self.spans = np.array([_span(t) for t in tensors] or [(0, 0)], np.int64)
        self.writer, self.reader = {}, {}

    def load(self, program: Any, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which of the addresses are inside a tensor of the launch."""
        inside = self._inside("reads", addresses, size)
        for address in np.unique(addresses).tolist():
            if self.writer.get(address, program) != program:
                self.findings[f"{self.kernel}: reads what another program writes"] += 1
            known = self.reader.setdefault(address, program)
            if known != program:
                self.reader[address] = "several"
        return inside

    def store(self, program: Any, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which of the addresses are inside a tensor of the launch."""
        inside = self._inside("writes", addresses, size)
        for address in np.unique(addresses).tolist():
            if self.writer.get(address, program) != program:
                self.findings[f"{self.kernel}: two programs write one address"] += 1
            if self.reader.get(address, program) != program:
                self.findings[f"{self.kernel}: writes what another program reads"] += 1
            self.writer[address] = program
        return inside

    def change(self, program: Any, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which of the addresses of an atomic operation are inside a tensor of the launch."""
        return self._inside("changes", addresses, size)

    def _inside(self, what: str, addresses: np.ndarray, size: int) -> np.ndarray:
        self.addresses += addresses.size
        inside = np.zeros(addresses.shape, bool)
        for low, high in self.spans:
            inside |= (addresses >= low) & (addresses + size <= high)
        if not inside.all():
            self.findings[f"{self.kernel}: {what} out of bounds"] += int((~inside).sum())
        return inside


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
