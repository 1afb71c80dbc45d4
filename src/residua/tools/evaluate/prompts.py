"""Prompt sets: plain text, CSV, JSONL, scenes of the model in the box, and the folders in which VBench and
PBench are published."""

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...world.held_out import SETS
from .tables import TomlTable

MAX_PROMPT_BYTES = 64 << 20
VBENCH_INFO = "VBench_full_info.json"
VBENCH_TEXT = ("all_dimension.txt", "prompts/all_dimension.txt")
PBENCH_INFO = "*_full_info.json"  # cosmos_predict2_bench_full_info.json, as PBench is published
PBENCH_IMAGES = "condition_image"
SOURCES = ("file", "texts", "scenes", "vbench", "pbench")


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set.

    Args:
        text: What the pipeline gets.
        name: Its name in a benchmark that names videos by it (PBench's `video_id`), otherwise empty.
        category: Dimension or category of the benchmark, for information.
        image: The first frame for image-to-video, or None.
    """

    text: str
    name: str = ""
    category: str = ""
    image: str | None = None


def read_prompts(table: TomlTable, folder: Path) -> tuple[Prompt, ...]:
    """The prompts that the table `[prompts]` of a suite names; paths are relative to the suite's folder."""
    given = [name for name in SOURCES if name in table.names()]
    if len(given) != 1:
        raise InputError(
            f"[prompts] names {', '.join(given) or 'nothing'}: wanted one of {', '.join(SOURCES)}, "
            'for example file = "prompts.txt"'
        )
    found = _dispatch(given[0], table, folder)
    for name in SOURCES:
        table.get(name, list if name == "texts" else str)
    limit = table.get("limit", int)
    if limit is not None and limit < 1:
        raise table.error("limit", "wanted at least 1")
    table.finish()
    unique = list(dict.fromkeys(found))[:limit]
    for prompt in unique:
        _check_letters(prompt, given[0])
    texts = [prompt.text for prompt in unique]
    if not unique:
        raise InputError(f"[prompts] {given[0]}: no prompt was found in it")
    twice = next((text for text in texts if texts.count(text) > 1), None) if len(set(texts)) < len(texts) else None
    if twice is not None and not all(prompt.name or prompt.image for prompt in unique if prompt.text == twice):
        raise InputError(f"[prompts] {given[0]}: {twice!r} is there twice, with different columns; keep one of them")
    return tuple(unique)


def _check_letters(prompt: Prompt, source: str) -> None:
    """JSON can escape half of a character, which no file can hold."""
    for text in (prompt.text, prompt.name, prompt.category):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"[prompts] {source}: {text!a} is not valid Unicode ({error.reason})") from error


def _dispatch(source: str, table: TomlTable, folder: Path) -> list[Prompt]:
    if source == "texts":
        texts = table.get("texts", list)
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise table.error("texts", 'wanted a list of prompts such as ["a cat", "a dog"]')
        return [Prompt(text.strip()) for text in texts]
    if source == "scenes":
        name = table.get("scenes", str)
        if name not in SETS:
            raise table.error("scenes", f"wanted one of {', '.join(SETS)}")
        return [Prompt(text) for text in SETS[name]]
    path = folder / os.path.expanduser(table.get(source, str))
    if source == "file":
        return _from_file(path)
    if not os.path.isdir(path):
        raise InputError(f"{path}: no such folder; wanted the folder in which you have {source.upper()[:2]}ench")
    return _from_vbench(path) if source == "vbench" else _from_pbench(path)


def _from_file(path: Path) -> list[Prompt]:
    readers = {".txt": _lines, ".csv": _csv, ".jsonl": _jsonl}
    if path.suffix not in readers:
        raise InputError(f"{path}: wanted a file that ends in {', '.join(readers)}")
    return list(readers[path.suffix](_text(path), path))


def _lines(text: str, path: Path) -> Iterator[Prompt]:
    """One prompt per line; empty lines and lines that begin with # are skipped."""
    for line in text.split("\n"):
        if line.strip() and not line.startswith("#"):
            yield Prompt(line.strip())


def _csv(text: str, path: Path) -> Iterator[Prompt]:
    try:
        reader = csv.DictReader(io.StringIO(text), strict=True)
        columns = [name.strip() for name in reader.fieldnames or ()]
        if columns.count("prompt") != 1:
            raise InputError(f"{path}: columns {columns}: wanted a first line with a column `prompt`, once")
        reader.fieldnames = columns
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row:  # most likely a comma in the prompt, which would be cut there
                raise InputError(f'{where}: more columns than the first line has; write "a prompt, in quotes"')
            yield _from_columns(row, where, path.parent)
    except csv.Error as error:  # quotes that do not close, a NUL character, a field beyond 128 KiB
        raise InputError(f"{path}: not valid CSV ({error})") from error


def _jsonl(text: str, path: Path) -> Iterator[Prompt]:
    # not splitlines: it also cuts at characters that may stand in a JSON text, such as U+2028
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _from_columns(_json(line, where), where, path.parent)


def _from_columns(row: Any, where: str, folder: Path) -> Prompt:
    """From the columns prompt, name, category and image."""
    if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise InputError(f'{where}: wanted a text under "prompt"')
    image = row.get("image") or None
    return Prompt(
        row["prompt"].strip(),
        str(row.get("name") or ""),
        str(row.get("category") or ""),
        None if image is None else _image(folder / str(image), where),
    )


def _from_vbench(folder: Path) -> list[Prompt]:
    """VBench_full_info.json ({prompt_en, dimension}), or the list of all prompts as text."""
    info = folder / VBENCH_INFO
    if info.is_file():
        return [Prompt(str(entry["prompt_en"]).strip(), category=_dimensions(entry)) for entry in _entries(info)]
    for name in VBENCH_TEXT:
        if (folder / name).is_file():
            return list(_lines(_text(folder / name), folder / name))
    raise InputError(f"{folder}: neither {VBENCH_INFO} nor {' nor '.join(VBENCH_TEXT)}: not a folder of VBench")


def _dimensions(entry: Mapping[str, Any]) -> str:
    found = entry.get("dimension") or []
    return ", ".join(map(str, found)) if isinstance(found, list) else str(found)


def _from_pbench(folder: Path) -> list[Prompt]:
    """*_full_info.json ({video_id, prompt_en, image_name}) beside the folder condition_image."""
    info = sorted(folder.glob(PBENCH_INFO))
    if len(info) != 1:
        raise InputError(f"{folder}: {len(info)} files {PBENCH_INFO}; wanted one, as PBench is published")
    prompts = []
    for number, entry in enumerate(_entries(info[0])):
        where = f"{info[0]}, entry {number}"
        if not entry.get("video_id"):
            raise InputError(f'{where}: no "video_id"; wanted PBench\'s own file')
        image = entry.get("image_name")
        path = None if not image else _image(folder / PBENCH_IMAGES / str(image), where)
        category = str(entry.get("category") or entry.get("domain") or "")
        prompts.append(Prompt(str(entry["prompt_en"]).strip(), str(entry["video_id"]), category, path))
    return prompts


def _entries(path: Path) -> list[dict[str, Any]]:
    found = _json(_text(path), str(path))
    if not isinstance(found, list) or not all(isinstance(one, dict) and one.get("prompt_en") for one in found):
        raise InputError(f'{path}: wanted a list of objects with "prompt_en"')
    return found


def _image(path: Path, where: str) -> str:
    if not os.path.isfile(path):
        raise InputError(f"{where}: the image {path} does not exist")
    return str(path.resolve())


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({error})") from error


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_PROMPT_BYTES:
            raise InputError(f"{path}: larger than {MAX_PROMPT_BYTES >> 20} MiB; a prompt set is text")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason})") from error
    except (OSError, ValueError) as error:  # the latter for a path with a NUL character
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from error
