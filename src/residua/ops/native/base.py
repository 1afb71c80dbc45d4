"""What every part of the native backend needs: whether the library runs here, and a call of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar

import torch

from ...errors import BackendError
from ..backend import Backend
from . import abi, library
from .threads import torch_on_one_thread


class NativeBase(Backend):
    """A backend that runs its primitives in the native library; the primitives are in the subclasses."""

    devices: ClassVar[tuple[str, ...] | None] = ("cpu",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    head_dims: ClassVar[tuple[int, int]] = (8, 256)

    def __init__(self, isa: str | None = None) -> None:
        self._isa = isa

    def unavailable(self) -> str | None:
        lib = library.load()
        if lib.missing:
            return lib.missing
        try:
            self._isa_number()
        except BackendError as error:
            return str(error)
        return None

    def session(self) -> AbstractContextManager[None]:
        return torch_on_one_thread()

    def _isa_number(self) -> int:
        return library.ISAS.index(library.choose_isa(library.load(), self._isa))

    def _run(self, name: str, args: abi.Args) -> None:
        library.load().run(name, args, self._isa_number())
