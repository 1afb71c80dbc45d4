"""What the pages name exists: tests that are a promise's proof, files, modules."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("comfyui/tests/*.py")]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("comfyui/*.md"), *ROOT.glob("dev/**/*.md")]
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


def test_every_source_file_that_is_named_exists():
    files = [
        f"/{path.relative_to(ROOT)}"
        for folder in ("src", "dev", "tests", "comfyui", "examples")
        for path in (ROOT / folder).rglob("*.*")
    ]
    files += [f"/{path.name}" for path in ROOT.glob("*.*")]
    named = {
        (page.name, path)
        for page in PAGES
        for word in re.findall(r"`([^`\n]+)`", page.read_text())
        for path in re.findall(r"(?<![\w./*{-])[\w/-]+\.(?:py|cpp|h)\b", word)
    }
    gone = [(page, path) for page, path in sorted(named) if not any(file.endswith(f"/{path}") for file in files)]
    assert gone == []


def test_every_folder_of_the_package_that_is_named_exists():
    floors = "|".join(path.name for path in (ROOT / "src/residua").iterdir() if path.is_dir() and path.name[0] != "_")
    named = {
        (page.name, folder)
        for page in PAGES
        for folder in re.findall(rf"`(?:src/)?(?:residua/)?((?:{floors})/(?:\w+/)+)`", page.read_text())
    }
    gone = [(page, folder) for page, folder in sorted(named) if not (ROOT / "src/residua" / folder).is_dir()]
    assert named and gone == []


def test_every_module_that_is_named_exists():
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"(?:-m |`|::: )((?:residua|dev|tests)(?:\.(?!yml)[a-z_]\w*)+)", page.read_text())
    }

    def exists(name: str) -> bool:
        """Whether it is a module, or something that one may hold."""
        whole = ROOT / ("src" if name.startswith("residua") else "") / name.replace(".", "/")
        parent = whole.parent if whole.parent.is_dir() else whole.parent.with_suffix(".py")
        if whole.is_dir() or whole.with_suffix(".py").is_file():
            return True
        holder = parent / "__init__.py" if parent.is_dir() else parent
        return holder.is_file() and whole.name in holder.read_text()

    assert sorted((page, name) for page, name in named if not exists(name)) == []
