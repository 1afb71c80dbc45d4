"""Marks for tests that need the native library, and that run on every instruction set of this machine."""

import pytest

from residua.ops.native import library

MISSING = library.load().missing
needs_library = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def _isas() -> list[object]:
    """The best set and the one without SIMD always; those between share their templates and are slow tests."""
    isas = library.load().isas
    ends = {isas[0], isas[-1]} if isas else set()
    return [isa if isa in ends else pytest.param(isa, marks=pytest.mark.slow) for isa in isas]


on_every_isa = pytest.mark.parametrize("isa", _isas())
