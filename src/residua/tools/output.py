"""Writes results to disk: completely or not at all, never over somebody else's file, never through a link."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import InputError, ResiduaError
from ..util import json_text
from ..util.files import write_text_whole
from ..util.interrupts import uninterrupted

MARKER = ".residua"  # lists the files in a folder that Residua wrote and may therefore replace
MAX_MARKER_BYTES = 1 << 16
SCRATCH = ".*.*.????????"  # what `publish_files` writes first, beside a file with a suffix


class OutputError(ResiduaError):
    """A result could not be written."""


def check_folder(folder: Path, force: bool, reuse: bool = False) -> None:
    """Refuses a folder that is in use, before any work is done. `reuse` accepts one that Residua wrote."""
    if folder.is_symlink():
        raise InputError(f"{folder} is a link: give the folder itself")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: give a folder")
    ours = written_by_residua(folder)
    if force or not any(folder.iterdir()) or (reuse and ours):
        return
    way_out = "" if ours else f" and holds files that Residua did not write ({MARKER} is missing)"
    raise InputError(f"{folder} exists{way_out}: choose another --out, or add --force to replace its results")


def written_by_residua(folder: Path) -> list[str]:
    """The file names that the marker of a folder lists; empty without a marker."""
    marker = folder / MARKER
    if marker.is_symlink() or not marker.is_file() or marker.stat().st_size > MAX_MARKER_BYTES:
        return []
    names = marker.read_text(encoding="utf-8", errors="replace").splitlines()
    # Anybody can edit the marker: names that lead out of the folder are ignored.
    return [name for name in names if name and name == Path(name).name and name not in (".", "..")]


def publish_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes all files beside the folder first, then moves them in. Older results of ours are removed, other
    files stay. A full disk or Ctrl-C before the move leaves the folder as it was."""
    contents = {**files, MARKER: ("\n".join(files) + "\n").encode()}
    with _readable(folder):
        for name in contents:
            if (folder / name).is_symlink() or (folder / name).is_dir():
                raise InputError(f"{folder / name} is a link or a folder: remove it, or choose another --out")
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch: Path | None = None
        try:
            with uninterrupted():
                scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            for name, content in contents.items():
                _write(scratch / name, content)
            with uninterrupted():
                folder.mkdir(exist_ok=True)
                for name in set(written_by_residua(folder)) - set(contents):
                    if (folder / name).is_file():
                        (folder / name).unlink()
                for name in contents:
                    os.replace(scratch / name, folder / name)
                shutil.rmtree(scratch, ignore_errors=True)
                scratch = None
        finally:
            if scratch is not None:
                with uninterrupted():
                    shutil.rmtree(scratch, ignore_errors=True)


def publish_files(files: Mapping[Path, bytes]) -> None:
    """Writes single files: all of them to temporary names first, then moves them."""
    moves: list[tuple[Path, Path]] = []
    try:
        for path, content in files.items():
            with _readable(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with uninterrupted():
                    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
                    moves.append((Path(name), path))
                    os.close(descriptor)
                _write(Path(name), content)
        with uninterrupted():
            for scratch, path in moves:
                with _readable(path):
                    os.replace(scratch, path)
    finally:
        with uninterrupted():
            for scratch, _ in moves:
                scratch.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes the file completely or not at all; a link is replaced, not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_whole(path, json_text.dumps(value, indent=2) + "\n")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())  # a full disk may only be reported here
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path}: could not be written ({reason}); nothing was changed") from error
