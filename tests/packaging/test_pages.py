"""The tests that docs/reliability.md and SECURITY.md name as their proof exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("comfyui/tests/*.py")]
NAMES = {name for path in SOURCES for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("page", ["docs/reliability.md", "SECURITY.md"])
def test_every_test_that_is_named_exists(page):
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())
    names = [word for word in quoted if re.fullmatch(r"test_\w+", word)]
    paths = [word for word in quoted if re.fullmatch(r"(tests|comfyui)/[\w./]+", word)]
    assert names and paths
    assert sorted(set(names) - NAMES) == []
    assert [path for path in paths if not (ROOT / path).exists()] == []
    seeds = re.search(r"^PAST = \(([^)]*)\)", (ROOT / "tests/fuzz/test_cases.py").read_text(), re.MULTILINE)
    assert seeds is not None
    told = re.findall(r"seeds? (\d+(?:, \d+)*)", (ROOT / page).read_text())
    assert {number for found in told for number in found.split(", ")} <= set(seeds[1].split(", "))


def test_every_trial_has_a_row():
    rows = re.findall(r"^\| (\d+) \|.*`.*\|$", (ROOT / "docs/reliability.md").read_text(), re.MULTILINE)
    assert rows == [str(number) for number in range(1, 26)]
