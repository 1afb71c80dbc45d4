"""The list of files in docs/method.md is the walk of a call."""

import re
from pathlib import Path

import pytest

from dev.walk import walk
from residua.ops import backends

MAX_FILES = 30  # that a reader must pass to understand a call
METHOD = Path(__file__).parents[2] / "docs/method.md"


def test_the_page_lists_the_files_of_a_call_in_order():
    if reason := backends()["native"].unavailable():
        pytest.skip(reason)
    [section] = re.findall(r"## One call, file by file\n(.*?)(?:\n## |\Z)", METHOD.read_text(), re.DOTALL)
    files = walk()
    assert re.findall(r"^\d+\. `(.+?)`", section, re.MULTILINE) == files and len(files) <= MAX_FILES
