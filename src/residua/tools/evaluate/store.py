"""The folder of a suite: one Parquet file per row, written completely or not at all.

manifest.json        suite, versions, hashes of the rows (manifest.py)
rows/<id>.parquet    one row each
videos/<setting>/    the clips, named as VBench and PBench look for them
references/<id>.npy  frames of the dense clips, which others are compared with
waiting/<id>.npz     clips whose dense clip is not there yet
running/<id>         what is being made at this moment
logs/<id>.log        what happened to a row
"""

import errno
import fcntl
import io
import json
import os
import shutil
import socket
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import InputError
from ..output import SCRATCH, OutputError, publish_files
from .manifest import MANIFEST
from .rows import Row

DONE, FAILED = "done", "failed"
LOCK = "lock"
SAME = ("reference", "prompt", "prompt_name", "setting", "seed", "video")  # equal for the same row
FOLDERS = ("rows", "videos", "references", "waiting", "running", "logs")
WRITTEN = ("rows", "videos/*", "references", "waiting")  # where workers write files
LATER = ("report", "scores")  # folders that others make

_PART = pa.struct([("name", pa.string()), ("density", pa.float64()), ("cost", pa.float64()), ("error", pa.float64())])
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "reference", "status", "reason", "prompt", "prompt_name")),
        *((name, pa.string()) for name in ("category", "setting")),
        ("seed", pa.int64()),
        *((name, pa.string()) for name in ("video", "hash", "pipeline", "hardware", "host", "run")),
        *((name, pa.int64()) for name in ("attempts", "tokens", "frames", "height", "width")),
        ("sparse_calls", pa.int64()),
        ("dense_calls", pa.int64()),
        ("identical", pa.bool_()),
        *((name, pa.float64()) for name in ("psnr", "ssim", "gmsd", "lpips", "density", "cost")),
        *((name, pa.float64()) for name in ("error", "seconds", "cpu_seconds", "waited", "pflops")),
        *((name, pa.float64()) for name in ("dense_pflops", "physics_error", "physics_dense_error")),
        ("physics_kept", pa.bool_()),
        ("physics_bounces_off", pa.int64()),
        ("not_measured", pa.string()),
        ("notes", pa.string()),
        ("layers", pa.list_(_PART)),
        ("steps", pa.list_(_PART)),
    ]
)


class Store:
    """The folder, for the driver and for the workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Makes the folders; refuses one that holds something else."""
        try:
            str(self.folder.absolute()).encode()
        except UnicodeEncodeError as error:  # Parquet and the report name files in UTF-8
            raise InputError(f"--out {str(self.folder)!a}: wanted a path that is valid UTF-8") from error
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise InputError(f"{self.folder} is a link or a file: give a folder")
        if self.folder.is_dir() and not (self.folder / MANIFEST).exists():
            others = [path.name for path in self.folder.iterdir() if path.name not in (*FOLDERS, LOCK)]
            if others:
                raise InputError(f"{self.folder} holds {others[0]} and no {MANIFEST}: choose a new folder")
        for name in (*FOLDERS, *LATER):
            if (self.folder / name).is_symlink():
                raise InputError(_is_a_link(self.folder / name))
        for name in FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def prepare_videos(self, setting: str) -> None:
        folder = self.folder / "videos" / setting
        if folder.is_symlink():
            raise InputError(_is_a_link(folder))
        folder.mkdir(exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Allows one run at a time; the system releases the lock when a run ends, even if it crashes."""
        with open_to_append(self.folder / LOCK) as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                stream.seek(0)
                raise InputError(
                    f"{self.folder} is in use by another run ({stream.read().strip() or 'no details'}): wait "
                    "for it, or choose another --out"
                ) from error
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            stream.flush()
            yield

    def clear_unfinished(self) -> None:
        """Removes what workers leave that are ended: marks, and files that they were writing."""
        marks = (self.folder / "running").iterdir()
        for path in (*marks, *(path for name in WRITTEN for path in self.folder.glob(f"{name}/{SCRATCH}"))):
            path.unlink(missing_ok=True)

    # what is done

    def read_rows(self, ids: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Every row that is done or failed; a file that cannot be read counts as missing."""
        names = None if ids is None else set(ids)
        found = []
        for path in sorted((self.folder / "rows").glob("*.parquet")):
            if names is None or path.stem in names:
                row = self.read_row(path.stem)
                if row is not None:
                    found.append(row)
        return found

    def read_row(self, row_id: str) -> dict[str, Any] | None:
        try:
            table = pq.ParquetFile(self._row(row_id)).read()
            if table.schema != SCHEMA:  # of another version
                table = pq.read_table(self._row(row_id), schema=SCHEMA)
            rows = table.to_pylist()
        except (OSError, ValueError, pa.ArrowException):  # ValueError: text that is not UTF-8
            return None
        whole = len(rows) == 1 and rows[0]["id"] == row_id and rows[0]["status"] in (DONE, FAILED)
        return cast("dict[str, Any]", rows[0]) if whole else None

    def rows_of(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The rows that are done or failed, in their order; a file that belongs to another prompt, setting,
        seed or video counts as missing."""
        found = {row["id"]: row for row in self.read_rows([row.id for row in rows])}
        return [
            found[row.id]
            for row in rows
            if row.id in found and all(found[row.id][name] == getattr(row, name) for name in SAME)
        ]

    def finished(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The rows that need no work: failed ones, and done ones whose video exists."""
        known = {row.id: row for row in rows}
        return [
            found
            for found in self.rows_of(rows)
            if found["status"] == FAILED or (self.folder / known[found["id"]].video).is_file()
        ]

    def drop_failed(self) -> None:
        """Forgets failed rows, so that they are tried again."""
        for found in self.read_rows():
            if found["status"] == FAILED:
                self._row(found["id"]).unlink(missing_ok=True)

    def references(self) -> set[str]:
        return {path.stem for path in (self.folder / "references").glob("*.npy")}

    def running(self) -> int:
        try:
            return len(os.listdir(self.folder / "running"))
        except OSError:
            return 0

    # what workers write

    def write_row(self, values: dict[str, Any]) -> None:
        full = {name: values.get(name) for name in SCHEMA.names}
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([full], schema=SCHEMA), buffer)
        publish_files({self._row(str(values["id"])): buffer.getvalue()})

    def write_video(self, row: Row, content: bytes) -> None:
        publish_files({self.folder / row.video: content})

    def write_reference(self, row_id: str, frames: np.ndarray) -> None:
        publish_files({self._reference(row_id): _npy(frames)})

    def read_reference(self, row_id: str) -> np.ndarray | None:
        """The frames of a dense clip. A file that holds none is deleted, so that they are made again."""
        path = self._reference(row_id)
        try:
            found = np.load(path, allow_pickle=False)
        except OSError:
            return None
        except (ValueError, EOFError, zipfile.BadZipFile):
            found = None
        if isinstance(found, np.ndarray) and found.ndim == 4:
            return found
        path.unlink(missing_ok=True)
        return None

    def write_waiting(self, row_id: str, result: dict[str, Any], frames: np.ndarray) -> None:
        """Keeps a clip that cannot be measured yet."""
        buffer = io.BytesIO()
        np.savez(buffer, frames=frames, result=np.array(json.dumps(result)))
        publish_files({self._waiting(row_id): buffer.getvalue()})

    def read_waiting(self, row_id: str) -> tuple[dict[str, Any], np.ndarray] | None:
        try:
            with np.load(self._waiting(row_id), allow_pickle=False) as found:
                return json.loads(str(found["result"])), found["frames"]
        except (OSError, ValueError, KeyError, EOFError, RecursionError, zipfile.BadZipFile):
            return None

    def drop_waiting(self, row_id: str) -> None:
        self._waiting(row_id).unlink(missing_ok=True)

    def begin(self, row_id: str, run: str, phase: str) -> tuple[int, str]:
        """Marks a row as being made. Returns the number of this attempt within the run, and the phase in
        which the previous attempt died."""
        before = self._read_mark(row_id)
        attempt = before["attempt"] + 1 if before.get("run") == run else 1
        self._mark(row_id, run, phase, attempt)
        return attempt, str(before.get("phase", "")) if attempt > 1 else ""

    def phase(self, row_id: str, run: str, phase: str, attempt: int) -> None:
        self._mark(row_id, run, phase, attempt)

    def is_running(self, row_id: str) -> bool:
        """Whether a worker makes the row now; a worker of this machine that has died does not count."""
        mark = self._read_mark(row_id)
        if not mark or mark["host"] != socket.gethostname():
            return bool(mark)
        try:
            os.kill(mark["pid"], 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        return True

    def end(self, row_id: str) -> None:
        (self.folder / "running" / row_id).unlink(missing_ok=True)

    def _read_mark(self, row_id: str) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / "running" / row_id).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict) or not {"run", "phase", "host"} <= set(found):
            return {}
        return found if all(isinstance(found.get(name), int) for name in ("attempt", "pid")) else {}

    def _mark(self, row_id: str, run: str, phase: str, attempt: int) -> None:
        mark = {"run": run, "phase": phase, "attempt": attempt, "host": socket.gethostname(), "pid": os.getpid()}
        publish_files({self.folder / "running" / row_id: json.dumps(mark).encode()})

    def log(self, row_id: str, text: str) -> None:
        """Adds a line to the log of a row. Errors are ignored: a log must not stop a run."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            with open_to_append(self.folder / "logs" / f"{row_id}.log") as stream:
                stream.write(f"{stamp} {socket.gethostname()} {os.getpid()}  {text}\n")
        except OSError:
            pass

    def drop_references(self) -> None:
        shutil.rmtree(self.folder / "references", ignore_errors=True)
        (self.folder / "references").mkdir(exist_ok=True)

    def _row(self, row_id: str) -> Path:
        return self.folder / "rows" / f"{row_id}.parquet"

    def _reference(self, row_id: str) -> Path:
        return self.folder / "references" / f"{row_id}.npy"

    def _waiting(self, row_id: str) -> Path:
        return self.folder / "waiting" / f"{row_id}.npz"


def rows_table(rows: Sequence[dict[str, Any]], scores: Sequence[str] = ()) -> bytes:
    """All rows as one Parquet file, with a column for every score."""
    schema = SCHEMA
    for name in scores:
        schema = schema.append(pa.field(name, pa.float64()))
    full = [{name: row.get(name) for name in schema.names} for row in rows]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(full, schema=schema), buffer)
    return buffer.getvalue()


def open_to_append(path: Path) -> TextIO:
    """Opens a text file to add to it. Never through a link: somebody else's folder could name any file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    return os.fdopen(descriptor, "a+", encoding="utf-8", errors="backslashreplace")


def _is_a_link(path: Path) -> str:
    return f"{path} is a link, and files are written and deleted in it: put a folder in its place"


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


__all__ = ["DONE", "FAILED", "SCHEMA", "OutputError", "Store", "open_to_append", "rows_table"]
