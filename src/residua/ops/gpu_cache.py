"""What earlier runs found out about this machine's GPUs: self-tests, and which backend was fastest.

One small JSON file in the user's cache folder (`RESIDUA_CACHE` names another folder). A file that cannot be
read or written is ignored.
"""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..util.files import write_text_whole
from .triton.entry import installed_triton

MAX_BYTES = 1 << 20


def cache_file() -> Path:
    """The path of the file, whether it exists or not."""
    base = os.environ.get("RESIDUA_CACHE")
    if base:
        return Path(base) / "gpus.json"
    # not Path.home: it raises for a user whom the system does not know, as in some containers
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "residua" / "gpus.json"


def gpu_key(device: torch.device) -> str:
    """The GPU and the versions that its kernels depend on."""
    if device.type != "cuda":
        name = device.type
    else:
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)} sm_{major}{minor}"
    return f"{name}, residua {__version__}, torch {torch.__version__}, triton {installed_triton() or 'none'}"


def recall(device: torch.device) -> dict[str, Any]:
    """What is known about the GPU: `failed` {backend: reason}, `passed` [backends], `order` [backends]."""
    known = _read()
    found = known.get(gpu_key(device)) if known else None
    if not isinstance(found, dict):
        return {}
    kinds = {"failed": dict, "passed": list, "order": list}
    return {name: found[name] for name, kind in kinds.items() if isinstance(found.get(name), kind)}


def remember(device: torch.device, **facts: Any) -> None:
    """Adds facts about the GPU."""
    known = dict(_read())
    key = gpu_key(device)
    before = known.get(key)
    known[key] = {**(before if isinstance(before, dict) else {}), **facts}
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_whole(path, json.dumps(known, indent=1))
    except OSError:
        pass  # nothing is lost but time: the tests run again
    _parsed.cache_clear()


def _read() -> dict[str, Any]:
    path = cache_file()
    try:
        stat = path.stat()
    except OSError:
        return {}
    return _parsed(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=1)
def _parsed(path: Path, state: tuple[int, int, int]) -> dict[str, Any]:
    """The file as it is in that state: calls of attention ask for it again and again. Not to be changed."""
    if state[1] > MAX_BYTES:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
