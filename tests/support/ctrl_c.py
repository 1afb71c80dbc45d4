"""Every command that computes, small enough to be run many times, and what must hold after Ctrl-C in it.

python tests/support/ctrl_c.py demo tune    # at every function that they enter: some minutes each
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from residua.hosts.diffusers import dispatch
from residua.tools.capture import CaptureWriter, read_captures
from residua.tools.cli import app
from residua.tools.output import MARKER
from residua.world.held_out import DEMO_PROMPT, TUNING_PROMPTS
from tests.support.command import run
from tests.support.interrupt import Place, entries, interrupted_at
from tests.support.tiny_world import tiny_world

CLIP = ("--size", "16", "--frames", "8")
SPARSE = ("--min-tokens", "0", "--dense-steps", "0", "--dense-layers", "0")
CALL = ("--heads", "1", "--head-dim", "16", "--repeats", "1", "--backend", "torch")
STUDY = ("CALLS", "--quick", "--out", "out")
SUITE = """
model = "{weights}"
[prompts]
texts = {texts}
[generation]
steps = 2
size = "16x16"
frames = 8
[settings.anchored]
method = "anchored"
density = 0.4
min_tokens = 0
[run]
device = "cpu"
threads = 1
"""
# WEIGHTS, CALLS and SUITE stand for the files of `prepare`.
COMMANDS: dict[str, tuple[str, ...]] = {
    "demo": ("demo", "--model", "WEIGHTS", *CLIP, "--steps", "2", "--out", "out"),
    "generate": (
        "generate", "--model", "WEIGHTS", "--prompt", DEMO_PROMPT, *CLIP, *SPARSE, "--steps", "2",
        "--compare", "--out", "out/clip.mp4",
    ),
    "compare": (
        "compare", "--model", "WEIGHTS", "--densities", "0.4,0.5", "--partitions", "semantic",
        "--reconstructions", "none", *CLIP, *SPARSE, "--steps", "2", "--out", "out",
    ),
    "compare methods": (
        "compare", "--model", "WEIGHTS", "--methods", "dense,paper,svg2", *CLIP, *SPARSE, "--steps", "2",
        "--out", "out",
    ),
    "tune": (
        "tune", "--model", "WEIGHTS", "--target-error", "0.9", "--prompt", DEMO_PROMPT, *CLIP, *SPARSE,
        "--steps", "2", "--tries", "2", "--out", "out/profile.toml",
    ),
    "capture": (
        "capture", "--model", "WEIGHTS", "--layers", "0,1", "--heads", "0", "--steps", "0,1", "--run-steps",
        "2", *CLIP, "--out", "out",
    ),
    "analyze": ("analyze", *STUDY),
    "ablate": ("ablate", *STUDY),
    "reconstructions": ("reconstructions", *STUDY),
    "budgets": ("budgets", *STUDY),
    "baselines": ("baselines", *STUDY),
    "bench attention": ("bench", "attention", "--tokens", "64", *CALL, "--json", "out/one.json"),
    "bench sweep": ("bench", "sweep", "--tokens", "64,128", "--densities", "0.5", *CALL, "--out", "out"),
    "bench synthetic": ("bench", "synthetic", "--tokens", "64", "--heads", "1", "--head-dim", "16"),
    "dev.gpu_model": ("--tokens", "4096", "--heads", "1", "--head-dim", "64", "--json", "out/static.json"),
    "evaluate": ("evaluate", "SUITE", "--out", "out", "--ray", "off"),
    "plan": ("plan", "wan2.2", "--json", "out/plan.json"),
    "doctor": ("doctor",),
    "doctor self-test": ("doctor", "--self-test"),
}  # fmt: skip
ENDS = {"doctor self-test": (0, 1, 2)}  # without a GPU, or with one whose kernels fail
RESUMED = ("capture", "evaluate")  # they go on where they stopped; others begin again, with --force


def prepare(folder: Path) -> dict[str, str]:
    """What the commands read."""
    tiny_world().save_pretrained(folder / "weights")
    generator = torch.Generator().manual_seed(0)
    writer = CaptureWriter(folder / "calls", "tiny")
    for head in range(2):
        q, k, v = torch.randn(3, 128, 16, generator=generator).unbind(0)
        writer.add(q, k, v, layer=0, head=head, step=0, grid=(2, 8, 8))
    suite = folder / "suite.toml"
    suite.write_text(SUITE.format(weights=folder / "weights", texts=json.dumps(TUNING_PROMPTS[:1])))
    return {"WEIGHTS": str(folder / "weights"), "CALLS": str(folder / "calls"), "SUITE": str(suite)}


def command(name: str, files: dict[str, str], *more: str) -> Any:
    """Runs a command of `residua`, or one in dev/."""
    of = import_module(f"{name}.__main__").app if name.startswith("dev.") else app
    return run(*arguments(name, files), *more, of=of)


def arguments(name: str, files: dict[str, str]) -> list[str]:
    return [files.get(word, word) for word in COMMANDS[name]]


def spread(places: dict[Place, int], count: int) -> list[Place]:
    """So many places from the first to the last; every second one at the last time that it is entered."""
    found = list(places)
    chosen = dict.fromkeys(found[at * (len(found) - 1) // (count - 1)] for at in range(count))
    return [Place(one.file, one.function, places[one] if at % 2 else 1) for at, one in enumerate(chosen)]


def interrupt(name: str, files: dict[str, str], place: Place) -> None:
    """Runs a command in the current folder, with Ctrl-C at a place, and checks how it ended."""
    streams, threads = (sys.stdout, sys.stderr), torch.get_num_threads()
    try:
        with interrupted_at(place) as sent:
            found = command(name, files)
    except KeyboardInterrupt:  # while the command is built, before it begins: `residua.__main__` answers
        assert place.file == "tools/cli/app.py" and "__init__" in place.function, place
        return
    finally:
        forget_models()
    assert sent, f"{place} was not entered"
    assert found.exit_code == 130, f"{place}: {found.exit_code}\n{found.output}"
    assert "Traceback" not in found.output, found.output
    lines = [line for line in found.output.splitlines() if "stopped" in line]
    # In `app.py` the command has not begun or is over, and the line is what may be interrupted.
    assert lines == ["stopped"] or place.file == "tools/cli/app.py", f"{place}\n{found.output}"
    assert (sys.stdout, sys.stderr) == streams and torch.get_num_threads() == threads
    assert signal.getsignal(signal.SIGINT) is not None
    check_folder_is_whole(Path())


def forget_models() -> None:
    """Between `accelerate` and the block of a `with`, Ctrl-C ends the process while a model is accelerated. A
    test that shares this process must not see that."""
    for name in list(dispatch._rebound):
        dispatch._rebound[name] = 1
        dispatch.unbind(sys.modules[name])


def check_folder_is_whole(folder: Path) -> None:
    """No temporary file, every JSON valid, every file there that a marker lists, every row read."""
    for path in folder.rglob("*"):
        assert not path.name.startswith(".") or path.name == MARKER, path
        assert not path.name.endswith((".part", ".tmp")), path
        if path.suffix == ".json":
            json.loads(path.read_text())
        if path.name == MARKER:
            missing = [name for name in path.read_text().split("\n") if name and not (path.parent / name).is_file()]
            assert not missing, f"{path.parent} lacks {missing}"
        if path.suffix in (".parquet", ".mp4", ".npy", ".safetensors"):
            assert path.stat().st_size > 0, path
    if (folder / "out" / "manifest.json").exists() and list((folder / "out").glob("*.safetensors")):
        for call in read_captures(folder / "out"):
            call.load()


def made_so_far(folder: Path) -> dict[str, bytes]:
    """What a command that goes on later must not make again."""
    kept = (*folder.glob("out/*.safetensors"), *folder.glob("out/rows/*.parquet"))
    return {str(path): path.read_bytes() for path in kept}


def finish(name: str, files: dict[str, str]) -> None:
    """The same command again ends well, and keeps what was there."""
    kept = made_so_far(Path())
    writes = name not in RESUMED and any(word.startswith("out") for word in COMMANDS[name])
    found = command(name, files, *(["--force"] if writes else []))
    assert found.exit_code in ENDS.get(name, (0,)), found.output
    after = made_so_far(Path())
    assert name not in RESUMED or {path: after[path] for path in kept} == kept
    check_folder_is_whole(Path())


def places_of(name: str, files: dict[str, str], work: Path) -> dict[Place, int]:
    """Where a command can be interrupted, once everything is loaded that is loaded once."""
    os.chdir(tempfile.mkdtemp(dir=work))
    ended = command(name, files)
    assert ended.exit_code in ENDS.get(name, (0,)), ended.output
    os.chdir(tempfile.mkdtemp(dir=work))
    return entries(lambda: command(name, files))


def try_places(name: str, files: dict[str, str], work: Path, count: int | None) -> tuple[int, list[str]]:
    """The number of places that were tried, and what broke."""
    seen = places_of(name, files, work)
    every = [Place(one.file, one.function, at) for one, last in seen.items() for at in sorted({1, last})]
    todo = every if count is None else spread(seen, count)
    broken = []
    for place in todo:
        os.chdir(tempfile.mkdtemp(dir=work))
        try:
            interrupt(name, files, place)
            if name in RESUMED:
                finish(name, files)
        except Exception as error:
            broken.append(f"{place}: {type(error).__name__} {str(error)[:2000]}")
            print(f"{name} {broken[-1]}", flush=True)
    return len(todo), broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(COMMANDS)}")
    parser.add_argument("--places", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        files = prepare(Path(folder))
        for name in given.names or COMMANDS:
            began = time.perf_counter()
            count, broken = try_places(name, files, Path(folder), given.places)
            bad += len(broken)
            took = time.perf_counter() - began
            print(f"{name}: {count} places, {len(broken)} broken, {took:.0f} s", flush=True)
        os.chdir("/")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
