"""A call's kernels are launched on the device that holds its tensors, whichever is current."""

import importlib
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.jit import JITFunction

from dev.gpu_model.fake_cuda import fake_cuda
from residua import Config
from residua.ops.triton import TritonBackend
from residua.ops.triton.entry import device_guard, entry

SECOND = torch.device("cuda:1")


@pytest.mark.parametrize("reconstruction", ["anchored", "tail", "probe", "none"])
def test_every_launch_of_a_call_is_on_the_device_of_its_tensors(reconstruction):
    entered, launched = [], []

    @contextmanager
    def guard(device):
        entered.append(device)
        yield
        entered.pop()

    def run(self, *args, grid, warmup, **options):
        tensors = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
        launched.append((entered[-1] if entered else None, {x.device for x in tensors}))

    module = importlib.import_module("residua.api")
    with (
        fake_cuda(),
        mock.patch.object(module, "choose_backend", lambda *_: TritonBackend()),
        mock.patch("residua.ops.triton.entry.device_guard", guard),
        mock.patch.object(JITFunction, "run", run),
    ):
        q, k, v = (torch.empty(1, 2, 4096, 64, dtype=torch.bfloat16, device=SECOND) for _ in range(3))
        module.attention(q, k, v, Config(reconstruction=reconstruction))
    assert len(launched) > 10
    assert {device for device, _ in launched} == {SECOND}
    assert {device for _, devices in launched for device in devices} == {SECOND}


def test_the_guard_is_torchs_own():
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        guard = device_guard(SECOND)
    assert isinstance(guard, torch.cuda.device)
    assert guard.idx == 1


def test_without_tensors_on_a_gpu_nothing_is_guarded():
    with mock.patch.object(torch.cuda, "is_available", lambda: True), device_guard(torch.device("cpu")):
        pass
    assert entry(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
