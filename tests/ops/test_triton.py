"""The Triton backend as far as a machine without a GPU goes.

The kernels themselves run in Triton's interpreter, which must be switched on before Triton is imported: the
files of `triton_interpreter/` get processes of their own, the short ones one together.
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from residua.errors import BackendError
from residua.ops.backend import Demand
from residua.ops.select import choose_backend
from residua.ops.triton import TritonBackend

HERE = Path(__file__).parent / "triton_interpreter"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    return subprocess.run(
        [sys.executable, *arguments], env={**kept, **environment}, capture_output=True, text=True, timeout=1800
    )


@pytest.mark.slow
@pytest.mark.parametrize("names", ["grouping", "attention", "slots judging pipeline faults"])
def test_in_the_interpreter(names):
    pytest.importorskip("triton", reason="Triton is not installed")
    paths = os.pathsep.join([str(HERE), str(HERE.parents[2]), *sys.path])
    options = [
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-p",
        "sanitizer",
        "-p",
        "once",
        "-W",
        "ignore::RuntimeWarning",
    ]
    done = python(
        "-m",
        "pytest",
        *options,
        *(str(HERE / f"interpret_{name}.py") for name in names.split()),
        TRITON_INTERPRET="1",
        OMP_NUM_THREADS="1",
        PYTHONPATH=paths,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "findings: {}" in done.stdout  # no address out of bounds, no race between programs
    assert "skipped" not in done.stdout


def test_without_triton_there_is_a_reason_and_no_error():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import residua\n"
        "from residua.ops.triton import TritonBackend\n"
        "from residua.ops.flashinfer import FlashInferBackend\n"
        "print(TritonBackend().unavailable())"
    )
    done = python("-c", script, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed: pip install" in done.stdout


def test_importing_residua_does_not_import_triton():
    script = (
        "import sys, residua, residua.ops.triton, residua.ops.flashinfer\n"
        "print(sorted({'triton', 'flashinfer'} & set(sys.modules)))"
    )
    done = python("-c", script, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_package_does_not_hide_the_real_triton():
    real = pytest.importorskip("triton", reason="Triton is not installed")
    from residua.ops.triton import attend

    assert attend.triton is real
    assert hasattr(attend.triton, "jit")


def test_without_a_gpu_there_is_a_reason():
    pytest.importorskip("triton", reason="Triton is not installed")
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        (reason,) = TritonBackend().reasons(Demand(CPU, torch.float32, 64, 64))
        assert "no CUDA device" in reason
        with pytest.raises(BackendError, match="no CUDA device"):
            choose_backend("triton", Demand(CPU, torch.float32, 64, 64))


@pytest.mark.parametrize(
    ("demand", "capability", "reason"),
    [
        (Demand(CUDA, torch.bfloat16, 128, 128), (9, 0), None),
        (Demand(CUDA, torch.float32, 96, 64), (8, 0), None),
        (Demand(CUDA, torch.float16, 256, 256), (12, 0), None),
        (Demand(CUDA, torch.bfloat16, 128, 128), (7, 5), "sm_75: takes sm_80 and newer"),
        (Demand(CUDA, torch.float64, 128, 128), (9, 0), "dtype torch.float64"),
        (Demand(CUDA, torch.bfloat16, 300, 300), (9, 0), "head_dim=300"),
        (Demand(CPU, torch.bfloat16, 128, 128), (9, 0), "device cpu"),
    ],
)
def test_reasons(demand, capability, reason):
    pytest.importorskip("triton", reason="Triton is not installed")
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability),
    ):
        found = TritonBackend().reasons(demand)
    assert not found if reason is None else any(reason in text for text in found)


def test_on_a_gpu_auto_prefers_triton_until_flashinfer_is_measured_to_be_faster():
    pytest.importorskip("triton", reason="Triton is not installed")
    from residua.ops import flashinfer

    for capability, order, chosen in (
        ((9, 0), [], "triton"),
        ((9, 0), ["flashinfer", "triton"], "flashinfer"),
        ((10, 0), ["flashinfer", "triton"], "triton"),
    ):
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "get_device_capability", lambda device, found=capability: found),
            mock.patch.object(flashinfer, "missing_flashinfer", lambda: None),
            mock.patch("residua.ops.select.recall", lambda device, found=order: {"order": found}),
        ):
            assert choose_backend("auto", Demand(CUDA, torch.bfloat16, 128, 128)).name == chosen
            assert choose_backend("auto", Demand(CUDA, torch.float32, 96, 96)).name == "triton"


def test_a_kernel_that_does_not_build_names_the_way_out(monkeypatch):
    """The compiler is missing, or refuses: on a GPU that shows at the first launch."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.compiler.errors import CompilationError
    from triton.runtime.jit import JITFunction

    x, factor = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 8, 4)
    for error in (RuntimeError("ptxas not found"), CompilationError("", None, "cannot lower")):

        def fail(self, *arguments, problem=error, **options):
            raise problem

        monkeypatch.setattr(JITFunction, "run", fail)
        with pytest.raises(BackendError, match=r"Triton failed: .*(ptxas|lower).* Use backend='torch'"):
            TritonBackend().project(x, factor, False)
    monkeypatch.setattr(JITFunction, "run", mock.Mock(side_effect=torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        TritonBackend().project(x, factor, False)


def test_what_a_call_keeps_is_its_own_and_ends_with_it():
    x, order, backend = torch.zeros(3), torch.arange(3), TritonBackend()
    with backend.session() as outer, backend.session() as inner:
        outer._session.keep("rows", "in order", x, order)
        outer._session.keep("lost", "noted", x)
        assert outer._session.find("rows", x, order) == "in order"
        assert outer._session.find("rows", x.clone(), order) is None  # equal, and another tensor
        assert inner._session.find("rows", x, order) is None
        outer.release()
        assert outer._session.find("rows", x, order) is None
        assert outer._session.find("lost", x) == "noted"
    assert outer._session.find("lost", x) is None
    backend._session.keep("rows", "in order", x, order)
    assert backend._session.find("rows", x, order) is None  # outside of a call
