"""Holds docs/glossary.md against the sources: reserved words have their one meaning, names are there once."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src/residua"
SUFFIXES = {".py", ".h", ".cpp", ".html", ".toml", ".css", ".js"}
SOURCES = [path for path in sorted(LIBRARY.rglob("*")) if path.suffix in SUFFIXES]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.name not in ("glossary.md", "0023-the-house.md")]  # these name the words

# What is no word of this project, and the word that it has instead. Parts of names count: `rival_table`, `RivalTable`.
REPLACED = {
    "rivals?": "baseline",
    "portable": "torch (the backend), generic (the instruction set)",
    "bare": "without summary",
    "worth(?![ _](it|knowing|a)(?![a-z]))": "priority",
    "tamed?": "rescale",
    "give back": "restore",
    "chose nothing": "held-out",
    "fewest": "minimum, MIN_",
    "(least|most)(?=_)": "minimum, maximum",
}
# Words with one meaning, and the folders in which things can have it.
ROOMS = {
    "judge[ds]?|judging": ("api.py", "method/", "ops/", "tools/plan/", "tools/studies/"),
    "tail": ("config.py", "method/", "baselines/own.py", "hosts/settings.py", "tools/studies/"),
    # of noise; that of a scene in the world; a floor of the house
    "(?<!math\\.)(?<!tl\\.)(?<!\\.)(?<!std::)floors?(?!\\()": ("tools/", "world/"),
}


def part(words: str) -> re.Pattern[str]:
    """Finds words in text and in names, where `_` or a capital letter ends one."""
    return re.compile(rf"(?<![a-z])({words})(?![a-z])", re.IGNORECASE)


def places(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", line)  # RivalTable -> Rival_Table
            if pattern.search(spaced):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    return found


@pytest.mark.parametrize("words", REPLACED)
def test_words_that_were_replaced_do_not_come_back(words):
    found = places(part(words), SOURCES)
    if words != "(least|most)(?=_)":
        found += places(part(words), PAGES)
    assert found == [], f"the word is: {REPLACED[words]}"


@pytest.mark.parametrize("words", ROOMS)
def test_words_stay_in_their_rooms(words):
    outside = [p for p in SOURCES if not str(p.relative_to(LIBRARY)).startswith(ROOMS[words])]
    assert places(part(words), outside) == []


def test_limits_are_spelled_min_and_max():
    assert places(re.compile(r"\b(MOST|LEAST|FEWEST)_[A-Z]|_(MOST|LEAST)\b"), SOURCES) == []


def test_no_two_public_classes_share_a_name():
    homes = defaultdict(list)
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(LIBRARY)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_at_most_two_files_of_the_library_share_a_name():
    library = (path for path in LIBRARY.rglob("*.py") if "tools" not in path.relative_to(LIBRARY).parts)
    counts = Counter(path.name for path in library if path.name != "__init__.py")
    assert {name: count for name, count in counts.items() if count > 2} == {}


def test_the_glossary_has_every_word_once():
    entries = re.findall(r"^\*\*(.+)\*\*$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    words = [word.strip().lower() for entry in entries for word in re.sub(r"\(.*?\)", "", entry).split(",")]
    assert [word for word, count in Counter(words).items() if count > 1] == []
