"""The manifest of an evaluation folder: what made its rows, and whether a suite may continue it."""

import json
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...util import json_text
from ..output import publish_files
from .rows import hash_model
from .suite import Suite

FORMAT, VERSION = "residua-evaluation", 1
MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, or None if there is none; InputError if it is not one of ours."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error}); choose another --out") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise InputError(f"{path}: not a manifest of this version; choose another --out")
    if not _has_outline(found):
        raise InputError(f"{path}: not as `residua evaluate` writes it; choose another --out")
    return found


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    content = json_text.dumps({"format": FORMAT, "version": VERSION, **manifest}, indent=1) + "\n"
    publish_files({folder / MANIFEST: content.encode()})


def check_manifest(found: dict[str, Any] | None, suite: Suite, extend: bool, out: Path) -> dict[str, Any]:
    """The manifest to continue with; refuses a folder of another suite.

    Args:
        found: What the folder has, or None.
        suite: What is asked for now.
        extend: Whether prompts, seeds and settings may have been added.
        out: The folder, for messages.
    """
    model_hash = hash_model(suite.model)
    new: dict[str, Any] = {"suite": suite.to_dict(), "model_hash": model_hash, "runs": [], "hashes": {}}
    if found is None:
        return new
    old = found["suite"]
    fixed = [
        f"{name} was {old['fixed'].get(name)!r} and is {value!r}"
        for name, value in suite.fixed.items()
        if old["fixed"].get(name) != value
    ]
    if not fixed and found["model_hash"] != model_hash:
        fixed = [f"the files of {suite.model} have changed"]
    if fixed:
        raise InputError(f"{out} holds rows of another suite ({'; '.join(fixed)}): choose another --out")
    gone, added = _changes(old, new["suite"])
    if gone:
        raise InputError(f"{out} holds rows that the suite no longer has ({gone[0]}): choose another --out")
    if added and not extend:
        raise InputError(
            f"{out} was made without {added[0]}{' and others' if len(added) > 1 else ''}: add --extend to "
            "make what is new, or choose another --out"
        )
    return {**found, "suite": new["suite"]}


def _changes(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What is gone or changed, and what was added. Seeds count by position, because that is in the videos'
    names."""
    gone, added = [], []
    if list(new["seeds"])[: len(old["seeds"])] != list(old["seeds"]):
        gone.append(f"seeds {list(old['seeds'])}; new ones belong at the end")
    added += [f"seed {seed}" for seed in list(new["seeds"])[len(old["seeds"]) :]]
    was = {item["name"]: item["options"] for item in old["settings"]}
    now = {item["name"]: item["options"] for item in new["settings"]}
    gone += [f"[settings.{name}] as it was" for name, options in was.items() if now.get(name) != options]
    added += [f"[settings.{name}]" for name in now if name not in was]
    prompts_old = [tuple(sorted(item.items(), key=str)) for item in map(_plain, old["prompts"])]
    prompts_new = [tuple(sorted(item.items(), key=str)) for item in map(_plain, new["prompts"])]
    kept = set(prompts_new)
    gone += [f"prompt {dict(item)['text']!r}" for item in prompts_old if item not in kept]
    before = set(prompts_old)
    added += [f"prompt {dict(item)['text']!r}" for item in prompts_new if item not in before]
    return gone, added


def _plain(prompt: dict[str, Any]) -> dict[str, Any]:
    return {name: prompt.get(name) for name in ("text", "name", "image")}


def _has_outline(manifest: dict[str, Any]) -> bool:
    """Whether all parts of a manifest are there, with the right types."""
    suite = manifest.get("suite")
    if not isinstance(suite, dict) or not isinstance(manifest.get("model_hash"), str):
        return False
    lists = (manifest.get("runs"), *(suite.get(name) for name in ("seeds", "settings", "prompts")))
    tables = (manifest.get("hashes"), suite.get("fixed"))
    if not all(isinstance(item, list) for item in lists) or not all(isinstance(t, dict) for t in tables):
        return False
    entries = (*suite["settings"], *suite["prompts"], *manifest["runs"])
    return (
        all(isinstance(entry, dict) for entry in entries)
        and all(isinstance(item.get("name"), str) and "options" in item for item in suite["settings"])
        and all(_is_plain(item) for item in suite["prompts"])
        and all(isinstance(run.get("versions"), dict) for run in manifest["runs"])
    )


def _is_plain(prompt: dict[str, Any]) -> bool:
    return all(isinstance(prompt.get(name), (str, type(None))) for name in ("text", "name", "image"))
