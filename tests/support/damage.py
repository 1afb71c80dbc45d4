"""Damaged files, the same on every machine: changed bytes, and fields that hold what they should not."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from residua.errors import InputError

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1 << 31, 1 << 63, -(1 << 64), 10**400, 0.0, -0.5, 0.3, 1e308, 5e-324,
    float("nan"), float("inf"), "", " ", "x", "0", "²", "٣", "\x00", "a\x00b.safetensors", "\ud800", "\n",
    "../outside.safetensors", "/etc/passwd", "..", "a/b", "~", "~nobody-at-all/x", "[red]", "<script>",
    "x" * 5000, [], [[]], [0], [None], [[0, 1]], [[1, 0]], [[-1, 3]], ["x"], [1e400], {}, {"x": 1},
    {"": None}, [{"x": []}],
)  # fmt: skip
LUMPS = (
    b"", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"[", b"[" * 3000, b"{" * 3000, b'"', b"'''", b"]", b"=",
    b"\n", b"\r", b"1" * 5000, b"0x" + b"f" * 5000, b"1e999", b"nan", b"-inf", b"\\u0000", b"\\ud800",
    b"null", b"1979-05-27T07:32:00Z", b"\xef\xbb\xbf", b",", b"../", b"PK\x03\x04", b"\x80\x04\x95",
)  # fmt: skip


def damaged_bytes(r: random.Random, content: bytes) -> bytes:
    """One to three changes: cut, flipped, overwritten, put in, doubled, or noise alone."""
    data = bytearray(content)
    for _ in range(r.choice((1, 1, 3))):
        kind, at = r.randrange(6), r.randrange(len(data) + 1)
        end = min(len(data), at + r.choice((1, 4, 40)))
        if kind == 0:
            del data[at:]
        elif kind == 1 and data:
            data[at % len(data)] ^= 1 << r.randrange(8)
        elif kind == 2:
            data[at:end] = r.randbytes(end - at)
        elif kind == 3:
            data[at:at] = r.choice(LUMPS)
        elif kind == 4:
            data[at:at] = data[at:end]
        elif r.random() < 0.2:
            data = bytearray(r.randbytes(r.randrange(200)))
    return bytes(data)


def damaged_fields(r: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """One or two fields, at any depth, gone, renamed or with another value."""
    found = copy.deepcopy(values)
    for _ in range(r.choice((1, 1, 2))):
        places = list(_places(found))
        if not places:
            return found
        inside, key = r.choice(places)
        kind = r.randrange(8)
        if kind == 0:
            del inside[key]
        elif kind == 1 and isinstance(inside, dict):
            inside[r.choice(("x", "", "densty", "file"))] = inside.pop(key)
        else:
            inside[key] = copy.deepcopy(r.choice(HOSTILE))
    return found


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, inner in items:
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def toml_bytes(tables: dict[str, Any]) -> bytes:
    """Every value in place, tables inline; TOML has no null: such a field is left out."""
    lines = (f"{json.dumps(key)} = {_toml(value)}" for key, value in tables.items() if value is not None)
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value if item is not None) + "]"
    if isinstance(value, (bool, str)):
        return json.dumps(value)
    return hex(value) if isinstance(value, int) and value > 0 else repr(value)


def refused(seed: int, read: Callable[[], Any], check: Callable[[Any], None] = lambda found: None) -> bool:
    """Whether a reader refuses, as it must: with an InputError of one line."""
    try:
        found = read()
    except InputError as error:
        text = str(error)
        assert text and "\n" not in text and "\r" not in text, f"seed {seed}: {text!r}"
        return True
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    check(found)
    return False


def damage_of(seed: int, values: dict[str, Any], write: Callable[[Any], bytes]) -> bytes:
    r = random.Random(seed)
    return damaged_bytes(r, write(values)) if r.random() < 0.5 else write(damaged_fields(r, values))
