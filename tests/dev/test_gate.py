"""The compile gate, and what launching on tensors without memory proves: nothing is read back to the host."""

import importlib
import json
import pkgutil
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")

import residua
from dev.gate import __main__ as command
from dev.gate import compile as gate
from dev.gate.cases import Case, cases, empty, route, tokens
from dev.gpu_model.trace import WAITS
from residua.errors import BackendError
from residua.ops import triton as package
from residua.ops.triton import TritonBackend
from residua.ops.triton.shapes import Tiles, imagined_gpu

pytestmark = pytest.mark.slow


@contextmanager
def launches():
    """Records the kernels that are launched, and launches none of them."""
    from triton.runtime.jit import JITFunction

    seen = []
    with mock.patch.object(
        JITFunction, "run", lambda self, *a, grid, warmup, **k: seen.append((self.fn.__name__, grid))
    ):
        yield seen


def kernels():
    """Every kernel of the package, by name."""
    from triton.runtime.jit import JITFunction

    found = set()
    for module in pkgutil.iter_modules(package.__path__):
        members = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
        found |= {
            name for name, value in members.items() if isinstance(value, JITFunction) and name.endswith("_kernel")
        }
    return found


def test_every_kernel_is_in_the_gate():
    with launches() as seen:
        for case in cases():
            case.launch(TritonBackend())
    assert {name for name, _ in seen} == kernels()
    assert len(kernels()) >= 10
    assert all(0 < grid[0] < 2**31 for _, grid in seen)


COMPILE = """
import json, sys
from dev.gate import compile as gate
rows = gate.run_gate([int(sys.argv[1])], workers=1, everyday=True)
print(json.dumps([[r.kernel, r.variant, r.problems, r.registers, r.instruction] for r in rows]))
"""
INSTRUCTION = {90: "wgmma", 100: "tcgen05.mma"}


@pytest.mark.parametrize("arch", gate.ARCHITECTURES)
def test_what_a_default_call_launches_passes_the_gate(arch):
    """`make kernels` takes all kernels through all architectures. In a process of its own: Triton keeps what
    other tests compiled."""
    done = subprocess.run([sys.executable, "-c", COMPILE, str(arch)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert {name for name, *_ in rows} >= {"attend", "slots", "mass", "assign", "project", "key_covariance"}
    assert len(rows) >= 30
    assert not [row for row in rows if row[2]]
    (attend, *_) = [row for row in rows if row[0] == "attend"]
    assert attend[3] > 64
    assert attend[4] == INSTRUCTION.get(arch, "mma.sync")


def test_the_everyday_cases_are_a_part_of_all():
    chosen = [case for case in cases() if case.everyday]
    assert 10 <= len(chosen) <= 20 < len(cases())


@pytest.mark.parametrize(
    ("arch", "tiles", "problem"),
    [(80, Tiles(128, 64, 4, 3), "spills"), (89, Tiles(128, 128, 8, 6), "bytes of shared memory, the limit is 101376")],
)
def test_the_gate_tells_good_tiles_from_bad_ones(monkeypatch, arch, tiles, problem):
    monkeypatch.setattr(f"{package.__name__}.attend.tiles_for", lambda *_: tiles)
    (case,) = [c for c in cases() if c.label == "D=128 bf16" and c.launch.func.__name__ == "_attend"]
    rows = gate.compile_case(case, arch).values()
    assert not gate.passed(list(rows))
    assert any(problem in text for row in rows if row.kernel == "attend" for text in row.problems)
    assert problem in gate.verdict(list(rows))


@pytest.mark.parametrize("kind", ["", ", summary", ", drift"])
def test_heads_of_64_channels_do_not_spill_on_sm_100(kind):
    """Two blocks fit on a processor; with eight warps each, the assembler would spill to keep it so."""
    (case,) = [c for c in cases() if c.label == f"D=64 bf16{kind}" and c.launch.func.__name__ == "_attend"]
    rows = [row for row in gate.compile_case(case, 100).values() if row.kernel == "attend"]
    assert len(rows) == 2  # tall and low tiles
    assert gate.passed(rows)
    assert all(row.instruction == INSTRUCTION[100] for row in rows)


def test_a_kernel_that_does_not_compile_is_a_failure():
    def broken(backend):
        raise RuntimeError("PassManager::run failed")

    rows = list(gate.compile_case(Case("broken", broken), 90).values())
    assert not gate.passed(rows)
    assert "does not compile: PassManager::run failed" in gate.verdict(rows)


def test_the_report():
    good = gate.Compiled("attend", "D=64 bf16", 90, 120, 0, 65536, 8, "wgmma")
    bad = gate.Compiled("attend", "D=64 bf16", 80, 255, 40, 65536, 8, "none")
    assert gate.passed([good])
    assert bad.problems == ["spills 40 bytes", "the compiler dropped its products"]
    page = command.markdown([good, bad])
    failure = "FAIL: spills 40 bytes; the compiler dropped its products"
    assert f"| attend | D=64 bf16 | {failure} | 120 regs, 64.0 KiB, wgmma |" in page
    assert len(command.table([good, bad]).rows) == 1


def test_the_report_shows_the_worst_tile_of_a_variant():
    tall = gate.Compiled("attend", "D=64 bf16", 90, 128, 0, 65536, 8, "wgmma")
    low = gate.Compiled("attend", "D=64 bf16", 90, 108, 0, 32768, 4, "wgmma")
    spills = gate.Compiled("attend", "D=64 bf16", 90, 100, 32, 32768, 4, "wgmma")
    for rows in ([tall, low], [low, tall]):
        assert "| attend | D=64 bf16 | 128 regs, 64.0 KiB, wgmma |" in command.markdown(rows)
    assert "| FAIL: spills 32 bytes |" in command.markdown([tall, spills, low])


def test_the_gate_refuses_what_it_cannot_judge(monkeypatch):
    with pytest.raises(BackendError, match="sm_70 is not known"):
        gate.run_gate([70])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendError, match="replaces the compiler: unset it"):
        gate.run_gate()


def test_the_schedule_is_small_at_75600_tokens_and_40_heads():
    from residua.ops.triton.schedule import schedule_tiles

    with launches():
        schedule = schedule_tiles(route(), 128, 64)
    assert schedule.key_tiles.device.type == "meta"
    assert schedule.bytes < 280 << 20  # 16 bytes for each of 1,433 tiles of every query group


class Operations(TorchDispatchMode):
    """The names of the operations that torch runs, and those that bring data from the host."""

    def __init__(self):
        super().__init__()
        self.names, self.from_host = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.names.add(name)
        host = any(isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.numel() > 1 for x in args)
        if host and isinstance(result, torch.Tensor) and result.device.type == "meta":
            self.from_host.add(name)
        return result


@pytest.mark.parametrize(
    ("reconstruction", "arch", "launched"),
    [
        ("anchored", 90, {"slots_kernel", "key_covariance_kernel"}),  # drift is found by attend_kernel
        ("anchored", 89, {"slots_kernel", "key_covariance_kernel", "drift_kernel"}),
        ("probe", 90, {"rows_kernel", "merge_kernel", "affine_kernel"}),
    ],
)
@pytest.mark.parametrize("text", [False, True])
def test_a_warm_call_never_leaves_the_device(text, reconstruction, arch, launched):
    """Tensors without memory have no values: whatever reads one on the host fails. What is left are the waits
    inside torch's own functions, and these are known."""
    attention = importlib.import_module("residua.api")
    q, state, config = (
        tokens(128, torch.bfloat16),
        residua.State(),
        residua.Config(reconstruction=reconstruction, regroup_every=1),  # so that it clusters
    )
    span = (75000, 75600)
    options = (
        {"pinned_keys": span, "exact_queries": span, "key_mask": empty(1, 75600, dtype=torch.bool)} if text else {}
    )
    # autocast does not know the meta device, and is off inside a call anyway
    with (
        launches() as seen,
        imagined_gpu(arch),
        mock.patch.object(attention, "choose_backend", lambda *_: TritonBackend()),
        mock.patch.object(torch, "autocast", lambda *_, **__: nullcontext()),
    ):
        residua.attention(q, q, q, config, state, **options)
        seen.clear()
        with Operations() as operations:
            out = residua.attention(q, q, q, config, state, **options)
    assert out.shape == q.shape
    assert state.warm
    shared = {"project_kernel", "assign_kernel", "segment_mean_kernel", "mass_kernel"}
    assert shared | {"key_tiles_kernel", "attend_kernel"} | launched <= {name for name, _ in seen}
    assert not operations.names & WAITS
    # eigensolvers look at their error codes
    assert not {name for name in operations.names if "eigh" in name or "svd" in name}
    assert not operations.from_host
