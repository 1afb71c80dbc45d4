"""Writes captures: with a size limit, complete files only, and able to continue an interrupted run."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ...errors import InputError
from ...util import json_text
from ...util.files import write_whole
from .captures import FORMAT, MANIFEST, VERSION, Grid, Ranges, entry_key, read_captures, read_manifest


class CaptureWriter:
    """Adds calls to a folder and updates the manifest after each, so that an interrupted run can continue.

    `run` says what was generated; a folder of another model or run is refused. `limit_bytes` limits the
    tensors of the whole folder. Several processes may add to one folder, for example different layers.
    """

    def __init__(
        self, folder: str | Path, model: str, limit_bytes: int = 1 << 30, run: Mapping[str, Any] | None = None
    ) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        made = {"model": model, "run": dict(run or {}), "calls": []}
        self._manifest: dict[str, Any] = {"format": FORMAT, "version": VERSION, **made}
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise InputError(f"{self.folder} is a link or a file: give a folder")
        self._known: set[Any] = set()
        self._seen: tuple[int, ...] = ()  # the manifest that we know
        self.bytes = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        with alone_in(self.folder):
            if (self.folder / MANIFEST).exists():
                self._resume()
            elif any(self.folder.iterdir()):
                raise InputError(f"{self.folder} holds files and no {MANIFEST}: choose a new folder")

    def _resume(self) -> None:
        """Takes over what the folder holds: from an earlier run, or from another process meanwhile."""
        seen = _stamp(self.folder / MANIFEST)
        if seen == self._seen:
            return
        found = read_manifest(self.folder)
        self._seen = seen
        if not found["calls"]:  # a run that was interrupted before its first call: nothing to keep
            return
        for name in ("model", "run"):
            if found.get(name) != self._manifest[name]:
                raise InputError(
                    f"{self.folder} holds a capture of another {name} ({found.get(name)!r}, not "
                    f"{self._manifest[name]!r}): choose another folder, or repeat the same run"
                )
        self._manifest = found
        self._known = {entry_key(entry) for entry in found["calls"]}
        self.bytes = sum(call.path.stat().st_size for call in read_captures(self.folder))

    def __len__(self) -> int:
        return len(self._known)

    def has(self, layer: int | str, head: int, step: int | None, branch: str) -> bool:
        return (layer, head, step, branch) in self._known

    def add(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int | str,
        head: int,
        step: int | None = None,
        branch: str = "",
        grid: Grid | None = None,
        scale: float | None = None,
        text: Ranges | None = None,
        text_queries: Ranges | None = None,
    ) -> bool:
        """Writes one head: q [Nq, D], k [Nk, D], v [Nk, Dv]. False if it exists already or would exceed the
        limit."""
        tensors = {name: _compact(x) for name, x in zip("qkv", (q, k, v), strict=True)}
        safe = re.sub(r"[^A-Za-z0-9]+", "-", f"{layer}"), re.sub(r"[^A-Za-z0-9]+", "-", branch)
        entry = {
            "file": f"L{safe[0]}_H{head}_S{step}_{safe[1] or 'all'}.safetensors",
            "layer": layer,
            "head": head,
            "step": step,
            "branch": branch,
            "grid": None if grid is None else list(grid),
            "scale": 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
            "text": None if text is None else [list(pair) for pair in text],
            "text_queries": None if text_queries is None else [list(pair) for pair in text_queries],
        }
        with alone_in(self.folder):
            return self._add(entry, tensors)

    def _add(self, entry: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
        if (self.folder / MANIFEST).exists():
            self._resume()
        size = sum(x.numel() * x.element_size() for x in tensors.values())
        if entry_key(entry) in self._known or self.bytes + size > self.limit_bytes:
            return False
        if not self._known:
            # First: a folder with a call and no manifest would be taken for somebody else's.
            _write_manifest(self.folder, self._manifest)
        _replace(self.folder / str(entry["file"]), lambda path: save_file(tensors, path))
        more = {**self._manifest, "calls": [*self._manifest["calls"], entry]}
        _write_manifest(self.folder, more)
        self._manifest, self._seen = more, _stamp(self.folder / MANIFEST)
        self._known.add(entry_key(entry))
        self.bytes += size
        return True


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other processes from adding to the folder meanwhile, where the system can lock one (not on
    Windows, nor on some network file systems: there only one process may)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # and with it the lock


def clear_capture(folder: Path) -> None:
    """Deletes the calls that a folder's manifest lists, and the manifest; other files stay."""
    if not (folder / MANIFEST).exists():
        return
    found = read_manifest(folder)
    calls = read_captures(folder) if found["calls"] else []
    # Whatever stops this, the folder can be used again: its manifest lists no call that is gone.
    _write_manifest(folder, {**found, "calls": []})
    for call in calls:
        call.path.unlink()
    (folder / MANIFEST).unlink()


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    text = json_text.dumps(manifest, indent=1) + "\n"
    _replace(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


def _stamp(path: Path) -> tuple[int, ...]:
    """Tells a manifest from the next one, which is another file."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _compact(x: Tensor) -> Tensor:
    """Half precision, unless a value is out of its range."""
    x = x.detach().to("cpu")
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.contiguous()
    half = x.to(torch.float16)
    return (half if bool(torch.isfinite(half).all()) else x.float()).contiguous()


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file completely or not at all."""
    try:
        write_whole(path, write)
    except (OSError, SafetensorError) as error:  # the latter is what `save_file` makes of a full disk
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: could not be written ({reason})") from error
