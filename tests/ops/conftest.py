"""Shared by the tests of backends."""

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
