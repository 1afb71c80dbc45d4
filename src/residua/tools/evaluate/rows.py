"""A suite as rows: prompt x seed x setting, each with an id that never changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from .prompts import Prompt
from .suite import Setting, Suite

MAX_NAME_BYTES = 180  # of a video's name without its number: file systems allow 255
ID_LENGTH = 20
MAX_ROWS = 200_000  # each is a task of Ray's and some files
MAX_HASHED_BYTES = 64 << 20  # larger files of a model folder are identified by name and size


@dataclass(frozen=True)
class Row:
    """One clip to make. `reference` is the id of the dense row it is compared with (its own id for dense),
    `video` the path of the file in the folder."""

    id: str
    prompt: str
    prompt_name: str
    category: str
    image: str | None
    seed: int
    setting: str
    reference: str
    video: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Row:
        return cls(**json.loads(text))

    @property
    def pair(self) -> tuple[str, str | None, int]:
        """What the row has in common with its dense row."""
        return self.prompt, self.image, self.seed


def make_rows(suite: Suite, model_hash: str) -> list[Row]:
    """Every row of the suite, prompt by prompt and seed by seed, dense first.

    Args:
        suite: What to evaluate.
        model_hash: Identifies the model (`hash_model`).
    """
    total = len(suite.prompts) * len(suite.seeds) * len(suite.settings)
    if total > MAX_ROWS:
        raise InputError(
            f"{len(suite.prompts)} prompts x {len(suite.seeds)} seeds x {len(suite.settings)} settings are "
            f"{total:,} rows: wanted at most {MAX_ROWS:,}; use [prompts] limit or several suites"
        )
    rows = []
    dense = suite.settings[0]
    for prompt in suite.prompts:
        image_hash = None if prompt.image is None else hash_file(Path(prompt.image))
        for number, seed in enumerate(suite.seeds):
            shared = [suite.fixed, model_hash, prompt.text, prompt.name, image_hash, seed]
            reference = _hash([*shared, asdict(dense)])
            for setting in suite.settings:
                rows.append(
                    Row(
                        _hash([*shared, asdict(setting)]),
                        prompt.text,
                        prompt.name,
                        prompt.category,
                        prompt.image,
                        seed,
                        setting.name,
                        reference,
                        _video(prompt, setting, seed, number),
                    )
                )
    _check_videos(rows)
    return rows


def _check_videos(rows: Sequence[Row]) -> None:
    """Two clips must not be written to one file."""
    taken: dict[str, Row] = {}
    for row in rows:
        other = taken.setdefault(row.video, row)
        if other is not row:
            raise InputError(
                f"{row.video}: the clips of {other.prompt!r} and {row.prompt!r} would have this name; change "
                f"{'the name of one prompt' if row.prompt_name else 'one of the prompts'}"
            )


def in_working_order(rows: Sequence[Row], ahead: int) -> list[Row]:
    """Sorts rows so that each dense row comes `ahead` pairs before the rows that need it, which then hardly
    ever have to wait. Otherwise pair by pair, so that an interrupted run has whole pairs."""
    places = {pair: place for place, pair in enumerate(dict.fromkeys(row.pair for row in rows))}

    def place(row: Row) -> int:
        return places[row.pair] - (ahead if row.id == row.reference else 0)

    return sorted(rows, key=place)  # stable: settings stay in their order


def missing_rows(rows: Iterable[Row], done: set[str], references: set[str]) -> list[Row]:
    """The rows that are left to do. A dense row is made again if others need its frames and these are
    gone."""
    rows = list(rows)
    open_rows = [row for row in rows if row.id not in done]
    needed = {row.reference for row in open_rows} - references
    wanted = {row.id for row in open_rows} | needed
    return [row for row in rows if row.id in wanted]


def hash_model(model: str) -> str:
    """Identifies a model: by the contents of a folder's files (name and size of large ones), or by its
    name."""
    folder = Path(model)
    if not folder.is_dir():
        return _hash(["name", model])
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return _hash([[path.relative_to(folder).as_posix(), _hash_or_size(path)] for path in files])


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hash_or_size(path: Path) -> str | int:
    size = path.stat().st_size
    return size if size > MAX_HASHED_BYTES else hash_file(path)


def _hash(parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def _video(prompt: Prompt, setting: Setting, seed: int, number: int) -> str:
    """The file name that the scorers expect: VBench's {prompt}-{i}.mp4 or PBench's {video_id}__{seed}.mp4."""
    if prompt.name:
        return f"videos/{setting.name}/{_file_name(prompt.name)}__{seed}.mp4"
    image = "" if prompt.image is None else f" {_hash(prompt.image)[:8]}"
    return f"videos/{setting.name}/{_file_name(prompt.text)}{image}-{number}.mp4"


def _file_name(text: str) -> str:
    """The text itself if it is a valid file name, else a similar one with a hash."""
    safe = "".join("_" if letter in "/\\\0" or ord(letter) < 32 else letter for letter in text)
    safe = safe.encode()[:MAX_NAME_BYTES].decode(errors="ignore").lstrip(".")
    return safe if safe == text else f"{safe} {_hash(text)[:8]}"
