"""Which cases `make test` runs of a long list; `make test-all` runs all of them."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_is_quick(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """The values for `parametrize`: all but the first `quick` are slow tests."""
    values = list(values)
    return [*values[:quick], *(pytest.param(value, marks=pytest.mark.slow) for value in values[quick:])]
