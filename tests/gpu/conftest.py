"""Tests that need a GPU: `pytest -m gpu`. Elsewhere each is skipped, and says why."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    reason = None
    if not torch.cuda.is_available():
        reason = f"torch {torch.__version__} sees no CUDA device"
    elif torch.cuda.get_device_capability() < (8, 0):
        reason = "the kernels need sm_80 or newer"
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device():
    return torch.device("cuda")
