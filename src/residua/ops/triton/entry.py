"""How a primitive of the Triton backend is entered: whether Triton can run, on which device, and what its
failures say."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...errors import BackendError, ResiduaError
from ..backend import Backend

MIN_TRITON = (3, 5)  # as in pyproject.toml


def interpreting() -> bool:
    """Whether Triton runs kernels as Python on CPU tensors: for tests, thousands of times slower."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=1)
def installed_triton() -> str | None:
    """Its version, or None. Looked up on disk, so not once per call of attention."""
    return None if find_spec("triton") is None else version("triton")


def missing_triton() -> str | None:
    """Why Triton kernels cannot run on this machine at all, or None."""
    found = installed_triton()
    if found is None:
        return "Triton is not installed: pip install 'residua[gpu]'"
    if tuple(int(part) for part in found.split(".")[:2]) < MIN_TRITON:
        return f"Triton {found}: the kernels need {'.'.join(map(str, MIN_TRITON))} or newer, so a newer torch"
    if not interpreting() and not torch.cuda.is_available():
        return "no CUDA device (TRITON_INTERPRET=1 runs the kernels on CPU tensors, for tests only)"
    return None


@contextmanager
def explained(library: str, way_out: str) -> Iterator[None]:
    """Also a decorator. Libraries compile their kernels on first use; a failure must name the way out."""
    try:
        yield
    except (ResiduaError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Triton's errors are not importable without Triton, so they are told by where they come from
        if not isinstance(error, RuntimeError) and not type(error).__module__.startswith("triton."):
            raise
        raise BackendError(f"{library} failed: {str(error).strip()}. Use backend={way_out!r}") from error


P = ParamSpec("P")
T = TypeVar("T")


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Makes the GPU that holds a call's tensors the current one: Triton launches on the current device and
    its stream, wherever the tensors are."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.device(device)
    return nullcontext()


def entry(primitive: Callable[P, T]) -> Callable[P, T]:
    """Wraps a primitive: on the device of its first tensor, with errors that name the way out."""

    @wraps(primitive)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        device = tensor.device if tensor is not None else torch.device("cpu")
        with device_guard(device), explained("Triton", "torch"):
            return primitive(*args, **kwargs)

    return wrapped


def launched(name: str, module: str) -> Callable[..., Any]:
    """A primitive as `module` has it, which takes the same arguments and returns None for what its kernels do not take:
    then plain torch computes. It is imported at the first call, so that `import residua` needs no Triton."""

    @entry
    def primitive(self: Backend, *args: Any, **kwargs: Any) -> Any:
        found = getattr(import_module(f".{module}", __package__), name)(*args, **kwargs)
        return getattr(Backend, name)(self, *args, **kwargs) if found is None else found

    return primitive
