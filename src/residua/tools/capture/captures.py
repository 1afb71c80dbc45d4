"""Recorded attention calls on disk: a folder with `manifest.json` and one safetensors file per call.

A folder without a manifest can be read too, if it holds safetensors files with q, k, v [N, D] whose names are
`model_L<layer>_H<head>...`. Only safetensors and JSON files are ever opened.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import InputError
from ...method.inputs import validate
from ...types import Call
from ...util.json_text import is_finite

MANIFEST = "manifest.json"
FORMAT, VERSION = "residua capture", 1
MAX_MANIFEST_BYTES = 16 << 20
MAX_HEADER_BYTES = 1 << 20
MAX_FILE_BYTES = 4 << 30
MAX_CALLS = 20_000
MAX_HEAD_DIM = 1024
DTYPES = ("F16", "BF16", "F32")
CODE = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".joblib")  # may run code when read

Ranges = tuple[tuple[int, int], ...]
Grid = tuple[int, int, int]
_PLAIN_NAME = re.compile(r"(?P<model>.+?)_L(?P<layer>\d+)_H(?P<head>\d+)(_S(?P<step>\d+))?")


@dataclass(frozen=True)
class CapturedCall:
    """One recorded call of one head. Text tokens are all that are not video: their keys are pinned, their
    query rows are computed exactly."""

    path: Path
    model: str
    layer: int | str
    head: int
    step: int | None
    branch: str
    grid: Grid | None  # frames, height, width, in tokens
    scale: float
    text: Ranges | None  # among the keys
    text_queries: Ranges | None
    tokens: int  # query rows
    keys: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.model} {self.name}"

    @property
    def name(self) -> str:
        parts = [f"L{self.layer}", f"H{self.head}"]
        parts += [] if self.step is None else [f"S{self.step}"]
        return " ".join([*parts, self.branch] if self.branch else parts)

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, H, Nq, D], k [1, H, Nk, D], v [1, H, Nk, Dv], fp32."""
        with _opened(self.path) as file:
            q, k, v = (file.get_tensor(name).float() for name in "qkv")
        return tuple(x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v))

    def call(self) -> Call:
        """The loaded tensors, validated, with text tokens pinned."""
        return validate(*self.load(), scale=self.scale, pinned_keys=self.text, exact_queries=self.text_queries)


def read_captures(folder: str | Path) -> list[CapturedCall]:
    """The calls of a folder in a fixed order; tensors stay on disk until `load()`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; wanted one that `residua capture` wrote")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in CODE)
    if pickles:
        raise InputError(f"{folder} holds {pickles[0]}: captures are safetensors and JSON only; take it out")
    manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
    found = sorted(folder.glob("*.safetensors")) if manifest is None else manifest["calls"]
    if not found:
        raise InputError(f"{folder}: no captured calls; wanted {MANIFEST} or files model_L0_H0.safetensors")
    if len(found) > MAX_CALLS:
        raise InputError(f"{folder}: more than {MAX_CALLS} calls; split the folder")
    if manifest is None:
        return [_from_plain(path) for path in found]
    return [_from_entry(folder, entry, manifest["model"]) for entry in found]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a capture folder, with its structure checked."""
    path = folder / MANIFEST
    try:
        if path.is_symlink() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise InputError(f"{path}: a link, or larger than {MAX_MANIFEST_BYTES} bytes; wanted a plain file")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); capture again") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise InputError(f"{path}: wanted format {FORMAT!r}, version {VERSION}; capture again")
    if not isinstance(found.get("calls"), list) or not isinstance(found.get("model"), str):
        raise InputError(f"{path}: wanted `model` as text and `calls` as a list")
    return found


def entry_key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry.get("layer"), entry.get("head"), entry.get("step"), entry.get("branch")


def _from_entry(folder: Path, entry: Any, model: str) -> CapturedCall:
    if not isinstance(entry, dict):
        raise InputError(f"{MANIFEST}: a call is {type(entry).__name__}; wanted an object")
    name = entry.get("file")
    if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
        raise InputError(f"{MANIFEST}: file {name!r}; wanted the plain name of a safetensors file beside it")
    layer, head, step, branch = entry_key(entry)
    if not isinstance(layer, (int, str)) or not isinstance(branch, str):
        raise InputError(f"{MANIFEST}: {name} has layer {layer!r}, branch {branch!r}; wanted a number or text")
    if not _whole(head) or not (step is None or _whole(step)):
        raise InputError(f"{MANIFEST}: {name} has head {head!r}, step {step!r}; wanted whole numbers")
    return _described(folder / name, {**entry, "model": model})


def _from_plain(path: Path) -> CapturedCall:
    found = _PLAIN_NAME.match(path.stem)
    if found is None:
        raise InputError(f"{path}: wanted a name such as model_L0_H0.safetensors, or a {MANIFEST}")
    with _opened(path) as file:
        metadata = file.metadata() or {}
    sizes = [int(part) for part in metadata.get("grid", "").split("x") if re.fullmatch("[0-9]{1,9}", part)]
    grid, scale = {2: [1, *sizes], 3: sizes}.get(len(sizes)), metadata.get("scale")
    step = None if found["step"] is None else int(found["step"])
    try:
        number = None if scale is None else float(scale)
    except ValueError:
        raise InputError(f"{path}: scale {scale!r} in its metadata; wanted a number") from None
    place = {"layer": int(found["layer"]), "head": int(found["head"]), "step": step, "branch": ""}
    return _described(path, {"model": found["model"], **place, "grid": grid, "scale": number})


def _described(path: Path, entry: Mapping[str, Any]) -> CapturedCall:
    """Checks the file's shapes and the numbers of its entry against each other."""
    shapes = _outline(path)
    queries, head_dim = shapes["q"][-2:]
    keys = shapes["k"][-2]
    scale, grid = entry.get("scale"), entry.get("grid")
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    if not is_finite(scale):
        raise InputError(f"{path}: scale {scale!r}; wanted a finite number")
    pinned = _ranges(path, "text", entry.get("text"), keys)
    exact = _ranges(path, "text_queries", entry.get("text_queries"), queries)
    video = keys - sum(stop - start for start, stop in pinned or ())
    if grid is not None:
        fine = isinstance(grid, list) and len(grid) == 3 and all(_whole(side) and side > 0 for side in grid)
        if not fine or math.prod(grid) != video:
            raise InputError(f"{path}: grid {grid!r} of {video} video tokens; wanted [frames, height, width]")
    names: dict[str, Any] = {name: entry.get(name) for name in ("model", "layer", "head", "step", "branch")}
    return CapturedCall(
        path=path,
        **names,
        grid=None if grid is None else (grid[0], grid[1], grid[2]),
        scale=float(scale),
        text=pinned,
        text_queries=exact,
        tokens=queries,
        keys=keys,
        head_dim=head_dim,
    )


def _ranges(path: Path, name: str, value: Any, total: int) -> Ranges | None:
    if value is None:
        return None
    fine = isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_whole, pair)) and pair[0] <= pair[1] <= total
        for pair in value
    )
    if not fine:
        raise InputError(f"{path}: {name} {value!r}; wanted a list of [start, stop] up to {total}")
    return tuple((pair[0], pair[1]) for pair in value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _outline(path: Path) -> dict[str, list[int]]:
    """Shapes of q, k and v, without reading them."""
    with _opened(path) as file:
        names = set(file.keys())
        if not set("qkv") <= names:
            raise InputError(f"{path}: holds {', '.join(sorted(names))}; wanted q, k and v")
        parts = {name: file.get_slice(name) for name in "qkv"}
        shapes = {name: list(part.get_shape()) for name, part in parts.items()}
        dtypes = {part.get_dtype() for part in parts.values()}
    q, k, v = shapes["q"], shapes["k"], shapes["v"]
    if not dtypes <= set(DTYPES):
        raise InputError(f"{path}: {', '.join(sorted(dtypes))}; wanted {', '.join(DTYPES)}")
    single = all(len(shape) == 2 or math.prod(shape[:-2]) == 1 for shape in (q, k, v) if len(shape) >= 2)
    if min(map(len, (q, k, v))) < 2 or not single or q[-1] != k[-1] or k[-2] != v[-2]:
        raise InputError(f"{path}: q {q}, k {k}, v {v}; wanted one head, [Nq, D], [Nk, D] and [Nk, Dv]")
    if min(q[-2:] + k[-2:] + v[-2:]) < 1 or max(q[-1], v[-1]) > MAX_HEAD_DIM:
        raise InputError(f"{path}: q {q}, v {v}; wanted tokens, and a head dim of 1 to {MAX_HEAD_DIM}")
    return shapes


def _opened(path: Path) -> Any:
    """Opens the file after checking what the parser cannot be trusted with: links and sizes."""
    try:
        if path.is_symlink():
            raise InputError(f"{path}: a link; wanted the file itself")
        size = path.stat().st_size
        with path.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
        if size > MAX_FILE_BYTES or header > min(MAX_HEADER_BYTES, size):
            raise InputError(f"{path}: {size} bytes with a header of {header}; too large, or cut short")
        return safe_open(path, framework="pt", device="cpu")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        raise InputError(f"{path}: not a valid safetensors file ({error}); capture it again") from error
