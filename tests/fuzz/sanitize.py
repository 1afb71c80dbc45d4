"""Runs a part of the tests on a native library that watches itself: `python -m tests.fuzz.sanitize address`.

"address" finds reads and writes out of bounds and undefined behaviour, "thread" finds data races. The library
is built in a copy of the package under build/, so that the installed one stays as it is, by JOBS compilers at
a time (2 unless the environment says otherwise). Needs GCC on Linux.
"""

import os
import platform
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
KINDS = {"address": ("address,undefined", "libasan.so"), "thread": ("thread", "libtsan.so")}
CASES = {"address": "150", "thread": "40"}
NATIVE = ("native", "native_covariance", "native_drift", "native_slots", "native_small", "native_stages")
TESTS = {
    "address": [*(f"ops/test_{name}.py" for name in NATIVE), "fuzz/test_routes.py"],
    "thread": ["ops/test_native_threads.py"],
}


def build(kind: str) -> Path:
    """A copy of the package with a library that was compiled with the sanitizer: a folder to import."""
    folder = ROOT / "build" / f"sanitize-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "src", folder, ignore=shutil.ignore_patterns("__pycache__", "*.so", "weights"))
    with mock.patch("setuptools.setup"):
        settings = runpy.run_path(str(ROOT / "setup.py"))
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = ["-std=c++17", "-O1", "-g", "-fPIC", "-pthread", "-fno-omit-frame-pointer", "-w"]
    flags += [f"-fsanitize={KINDS[kind][0]}", "-fno-sanitize-recover=undefined"]

    runs = Path("/proc/cpuinfo").read_text().split()

    def compiled(source: Path) -> str:
        own = settings["X86_FLAGS"].get(source.stem, []) if x86 else []
        if "avx512" in source.stem and "avx512f" not in runs:
            own = []  # then the file compiles to "not available", in a second instead of minutes
        target = folder / (source.stem + ".o")
        subprocess.run(["g++", *flags, *own, "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    room = folder / "residua" / "ops" / "native"
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
        objects = list(pool.map(compiled, sorted((room / "src").glob("*.cpp"))))
    subprocess.run(["g++", "-shared", *flags, *objects, "-o", str(room / "_native.so")], check=True)
    return folder


def main() -> int:
    kind = sys.argv[1] if len(sys.argv) > 1 else "address"
    folder = build(kind)
    runtime = subprocess.run(
        ["gcc", f"-print-file-name={KINDS[kind][1]}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": f"halt_on_error=0:exitcode=66:suppressions={ROOT / 'tests/fuzz/tsan.txt'}",
    }
    fuzz = [sys.executable, "-m", "tests.fuzz.run", "--cases", CASES[kind], "--seconds", "1800", "--brief"]
    runs = [fuzz]
    if TESTS[kind]:
        tests = [str(ROOT / "tests" / name) for name in TESTS[kind]]
        # -s: a sanitizer ends the process, and what pytest has captured until then would be lost
        runs.append([sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *tests])
    for command in runs:
        print("$", " ".join(command), flush=True)
        status = subprocess.run(command, env=environment, cwd=ROOT).returncode
        if status:
            print(f"{kind}: status {status}")
            return 1
    print(f"{kind}: clean")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
