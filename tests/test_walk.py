"""How many files a reader of one call passes: those whose functions run, as docs/method.md lists them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

import residua
from residua import Config, State
from residua.ops import backends
from tests.support.oracle import qkv

PACKAGE = Path(residua.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "method.md"
MAX_FILES = 40


def files_of_a_call() -> list[str]:
    """Files of the package of which a function runs in a call with a new state, in order."""
    q, k, v = qkv(1, 2, 2, 4096, 4096, 64)
    config, found = Config(density=0.08, backend="native"), dict[str, None]()

    def seen(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            found[path.relative_to(PACKAGE).as_posix()] = None

    state, call = State(), residua.attention
    sys.setprofile(seen)
    try:
        call(q, k, v, config, state)
    finally:
        sys.setprofile(None)
    return list(found)


def of_the_method(files: list[str]) -> list[str]:
    return [name for name in files if name.startswith("method/")]


def test_the_page_lists_the_files_of_a_call_in_order() -> None:
    if reason := backends()["native"].unavailable():
        pytest.skip(reason)
    found = files_of_a_call()
    section = PAGE.read_text().split("## One call, file by file")[1].split("\n## ")[0]
    listed = re.findall(r"`([\w/]+\.py)`", section)
    assert len(found) <= MAX_FILES
    assert of_the_method(listed) == of_the_method(found)
