"""Autocast, inference mode, no_grad and inputs that require gradients."""

import pytest
import torch

from residua import InputError, attention
from residua.api import attend_route
from tests.support.oracle import qkv, random_route, small

pytestmark = pytest.mark.usefixtures("every_backend")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype, autocast):
    tensors = qkv(1, 2, 2, 300, dtype=dtype)
    wanted = attention(*tensors, small())
    route = random_route(1, 2, 2, 300, 300)
    raw = attend_route(*tensors, route, backend="torch")
    with torch.autocast("cpu", dtype=autocast):
        assert torch.equal(attention(*tensors, small()), wanted)
        assert torch.equal(attend_route(*tensors, route, backend="torch")[0], raw[0])
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes_change_nothing(mode):
    tensors = qkv()
    wanted = attention(*tensors, small())
    with mode():
        enabled = torch.is_grad_enabled()
        out = attention(*tensors, small())
        assert attention(*tensors, small(), pinned_keys=(0, 4), exact_queries=(0, 4)).isfinite().all()
        assert torch.is_grad_enabled() == enabled
    assert torch.equal(out, wanted) and not out.requires_grad


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_are_refused_or_cut(which):
    tensors = list(qkv(1, 2, 2, 90, 110))
    tensors[which] = tensors[which].requires_grad_()
    for call in (lambda: attention(*tensors), lambda: attend_route(*tensors, random_route())):
        with pytest.raises(InputError, match="inference only"):
            call()
        with torch.no_grad():
            result = call()
        assert not (result if torch.is_tensor(result) else result[0]).requires_grad
