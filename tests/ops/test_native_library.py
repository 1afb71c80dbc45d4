"""The native library as a whole: built where it can be, loaded with reasons, safe with threads and forks."""

import re
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import residua
from residua.errors import BackendError, RouteError
from residua.ops import native
from residua.ops.backend import Demand
from residua.ops.native import NativeBackend, abi, library
from residua.types import Partition, Route
from tests.support.native_library import MISSING, needs_library

SCALE = 0.2
SORT_FIELDS = ("heads", "tokens", "groups", "labels", "order", "offsets")


def make(tokens: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Route]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, tokens, dim, generator=g) for _ in range(3))
    query, kv = (
        Partition.from_labels(torch.randint(0, groups, (1, 2, tokens), generator=g), groups) for groups in (5, 9)
    )
    return q, k, v, Route(query, kv, torch.rand(1, 2, 5, 9, generator=g) < 0.5)


def test_library_is_built_where_a_compiler_exists():
    if MISSING is None:
        return
    compilers = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    if sys.platform == "linux" and compilers:
        pytest.fail(f"{MISSING}, although this machine has {', '.join(compilers)}")
    pytest.skip(MISSING)


@needs_library
def test_two_python_threads_may_call_at_once():
    cases = [make(700, 64, seed) for seed in range(2)]
    backend = NativeBackend()
    alone = [backend.attend(*case, SCALE)[0] for case in cases]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda i: backend.attend(*cases[i % 2], SCALE)[0], range(12)))
    assert all(torch.equal(out, alone[i % 2]) for i, out in enumerate(found))


@needs_library
def test_a_partition_that_points_outside_is_refused():
    q, k, v, route = make(60, 16)
    route.kv.order[0, 0, 7] = 60
    with pytest.raises(RouteError, match="from_labels"):
        NativeBackend().attend(q, k, v, route, SCALE)


@needs_library
def test_reasons_name_what_it_takes():
    demand = Demand(torch.device("cpu"), torch.float64, 300, 64)
    reasons = NativeBackend().reasons(demand)
    assert len(reasons) == 2 and "float64" in reasons[0] and "8..256" in reasons[1]
    assert native.isa() in library.ISAS


@needs_library
def test_the_environment_chooses_the_instruction_set(monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, "generic")
    assert native.isa() == "generic"
    monkeypatch.setenv(library.ISA_VARIABLE, "avx9000")
    assert "avx9000" in str(NativeBackend().unavailable())
    with pytest.raises(BackendError, match="avx9000"):
        native.isa()
    assert "avx7" in str(NativeBackend("avx7").unavailable())


@needs_library
def test_works_in_a_forked_child():
    code = (
        "import os, torch\n"
        "from residua.ops.native import NativeBackend\n"
        "x = torch.ones(1, 1, 3000, 8); f = torch.ones(1, 1, 8, 2)\n"
        "NativeBackend().project(x, f, False)\n"
        "pid = os.fork()\n"
        "ok = bool((NativeBackend().project(x, f, False) == 8).all())\n"
        "os._exit(0 if ok else 1) if pid == 0 else exit(os.waitpid(pid, 0)[1])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def test_a_missing_library_says_why(tmp_path: Path):
    assert "was not built: reinstall" in str(library.Library(tmp_path).missing)
    (tmp_path / "_native.txt").write_text("CompileError: no g++\n")
    without = library.Library(tmp_path)
    assert without.missing == "the native library was not built: CompileError: no g++"
    assert without.isas == ()
    with pytest.raises(BackendError, match="no g"):
        without.run("sort_groups", abi.SortArgs(**dict.fromkeys(SORT_FIELDS, 0)), 0)


def test_a_broken_library_says_so(tmp_path: Path):
    (tmp_path / "_native.so").write_bytes(b"not a library")
    assert "does not load" in str(library.Library(tmp_path).missing)


@needs_library
def test_a_library_that_was_cut_short_is_not_loaded(tmp_path: Path):
    """Loading it would end the process, not raise an error: so it is tried in another one."""
    whole = (Path(abi.__file__).parent / "_native.so").read_bytes()
    shares = (0.0001, 0.01, 0.5, 0.9, 0.999)
    for number, share in enumerate(shares):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "_native.so").write_bytes(whole[: int(len(whole) * share)])
    code = (
        "import sys, pathlib; from residua.ops.native import library\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()): print(library.Library(path).missing)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-400:]
    assert done.stdout.count("reinstall residua") == len(shares)


def test_without_the_library_calls_run_in_plain_torch(tmp_path: Path, monkeypatch):
    """The note of an installation without a compiler: attention works, and a call that insists on the native
    backend says why not."""
    (tmp_path / "_native.txt").write_text("CompileError: no g++\n")
    without = library.Library(tmp_path)
    monkeypatch.setattr(library, "load", lambda: without)
    q, k, v, _ = make(300, 16)
    out, receipt = residua.attention(q, k, v, return_receipt=True)
    assert receipt.backend == "torch" and out.isfinite().all()
    with pytest.raises(BackendError, match="CompileError: no g"):
        residua.attention(q, k, v, residua.Config(backend="native"))


def test_arguments_are_built_by_keyword_and_completely():
    with pytest.raises(TypeError):
        abi.SortArgs(1, 2, 3)
    for wrong in (dict.fromkeys(SORT_FIELDS[1:], 0), dict.fromkeys((*SORT_FIELDS, "rank"), 0)):
        with pytest.raises(TypeError, match="each of its fields"):
            abi.SortArgs(**wrong)


@needs_library
def test_a_library_whose_structs_differ_is_not_used(monkeypatch):
    folder, structs = Path(abi.__file__).parent, abi.structs()
    monkeypatch.setattr(abi, "structs", lambda: structs | {"KmeansArgs": 96})
    assert "KmeansArgs has 88 bytes in the native library, 96 in this package" in str(library.Library(folder).missing)
    monkeypatch.setattr(abi, "structs", lambda: dict(list(structs.items())[:-1]))
    assert "reinstall" in str(library.Library(folder).missing)


def test_fields_have_the_names_and_types_of_the_header():
    header = re.sub(r"//.*", "", (Path(abi.__file__).parent / "src" / "abi.h").read_text())
    kinds = {"int64_t": abi.c_int64, "int32_t": abi.c_int32, "float": abi.c_float, "double": abi.c_double}
    structs = {kind.__name__: kind for kind in abi.Args.__subclasses__()}
    for name, kind in structs.items():
        (body,) = re.findall(rf"struct {name} {{(.*?)}};", header, re.DOTALL)
        found = []
        for statement in filter(None, map(str.strip, body.split(";"))):
            typename, names = statement.removeprefix("const ").split(None, 1)
            field = abi.c_void_p if typename.endswith("*") else kinds.get(typename) or structs[typename]
            found += [(each.strip(), field) for each in names.split(",")]
        assert list(kind._fields_) == found, name


@needs_library
def test_a_library_of_another_version_is_not_used(monkeypatch):
    monkeypatch.setattr(abi, "VERSION", 1000)
    assert "this package 1000; reinstall" in str(library.Library(Path(abi.__file__).parent).missing)


def resident() -> int:
    """Bytes of this process. Its peak would hide what grows below the peak of the tests before."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_memory_does_not_grow():
    q, k, v, route = make(400, 64)
    backend = NativeBackend()
    for _ in range(20):
        backend.attend(q, k, v, route, SCALE)
    before = resident()
    for _ in range(200):
        backend.attend(q, k, v, route, SCALE)
    grown = resident() - before
    assert grown < 8 << 20, f"{grown} bytes after 200 calls"
