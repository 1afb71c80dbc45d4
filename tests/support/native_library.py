"""Marks for tests that need the native library, and that run on every instruction set of this machine."""

from __future__ import annotations

import pytest

from residua.ops.native import library

MISSING = library.load().missing
needs_library = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
on_every_isa = pytest.mark.parametrize("isa", library.load().isas)
