"""The other half of the random calls of `test_cases.py`."""

import pytest

from tests.fuzz.checks import PARTS, broken_in


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, PARTS, 2))
def test_random_calls(part):
    assert not broken_in(part)
