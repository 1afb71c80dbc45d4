"""The clips of the tests of `generate`."""

from tests.tools.generate.conftest import comparison, pipe

__all__ = ["comparison", "pipe"]
