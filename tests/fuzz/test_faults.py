"""Faults in the middle of things: no memory, no space, threads, forks; then everything works again."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import residua
from residua.ops.backend import TorchBackend
from residua.ops.native import NativeBackend
from residua.tools.output import write_json
from tests.fuzz import load

LIMITED = """
import resource, torch, residua
torch.set_num_threads(1)
small, large = torch.randn(3, 1, 2, 300, 16), torch.randn(3, 1, 8, 20000, 64)
state = residua.State()
before = residua.attention(*small, state=residua.State())
residua.attention(*small, state=state)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
try:
    residua.attention(*large, state=state)
    raise SystemExit("the limit was not felt")
except (MemoryError, RuntimeError) as error:
    assert "memory" in str(error).lower() or "alloc" in str(error).lower(), error
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert torch.equal(residua.attention(*small, state=residua.State()), before)
residua.attention(*small, state=state)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")
def test_out_of_memory_in_a_call_leaves_everything_usable():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-800:]


@pytest.mark.parametrize("stage", ["cell_mass", "attend"])
@pytest.mark.parametrize("kind", [NativeBackend, TorchBackend])
def test_no_memory_inside_a_backend(kind, stage, monkeypatch):
    """The error comes out as it is; the state that was in use, and a new one, work as if nothing had been."""
    if kind().unavailable():
        pytest.skip(str(kind().unavailable()))
    q, k, v = load.tensors(1, 2, 300, 16)
    config, state = residua.Config(density=0.3, backend=kind.name), residua.State()
    first = residua.attention(q, k, v, config, state)

    def none_left(*_: object, **__: object) -> None:
        raise MemoryError("no memory for a tile")

    with monkeypatch.context() as patched:
        patched.setattr(kind, stage, none_left)
        for _ in range(3):
            with pytest.raises(MemoryError, match="no memory for a tile"):
                residua.attention(q, k, v, config, state)
    assert residua.attention(q, k, v, config, state).isfinite().all()
    assert torch.equal(residua.attention(q, k, v, config, residua.State()), first)


@pytest.mark.slow
def test_accelerate_and_remove_again_and_again():
    pytest.importorskip("diffusers")
    found = re.match(r"(-?\d+) objects.* (\d+) layers left", load.cycles(200))
    assert found and int(found[1]) < 100 and int(found[2]) == 0


def test_a_full_disk_leaves_neither_half_a_file_nor_a_lost_one(tmp_path, monkeypatch):
    path = tmp_path / "figures.json"
    write_json(path, {"old": float("nan")})
    assert path.read_text() == '{\n  "old": null\n}\n'

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"new": 1})
    assert path.read_text() == '{\n  "old": null\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["figures.json"]


def test_an_output_through_a_link_does_not_overwrite_its_target(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link.json"
    target.write_text("mine")
    link.symlink_to(target)
    write_json(link, {"x": 1})
    assert target.read_text() == "mine" and not link.is_symlink()


def test_threads_and_serial_calls_agree():
    assert load.threads(workers=4, calls=10).startswith("0 of 40")


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_forked_children_agree():
    code = "from tests.fuzz import load; print(load.fork(2))"
    folder = Path(load.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.stdout.startswith("0 of 2"), done.stderr[-800:]
