"""Everything on the reference pages says what it takes and what it returns."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"^::: (\S+)(?:\n    options: \{([^}]*)\})?", re.MULTILINE)
OPEN = {"object", "None", "Iterator[None]", "AbstractContextManager[None]"}  # returns without a value to name


def entries() -> Iterator[tuple[str, str]]:
    """Names on the pages of the reference; of a module with `members`, those."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name, options in ENTRY.findall(page.read_text()):
            members = re.search(r"members: \[([^\]]*)\]", options)
            for member in members[1].split(",") if members else [""]:
                yield page.name, f"{name}.{member.strip()}".rstrip(".")


def nodes(name: str) -> list[ast.stmt]:
    """The definition of that name, also where a package only imports it; of a module, all that it defines."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath("src", *parts[:length])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.exists():
            continue
        body, wanted = ast.parse(file.read_text()).body, parts[length:]
        for node in body if wanted else []:
            if isinstance(node, ast.ImportFrom) and wanted[0] in [each.name for each in node.names]:
                return nodes(".".join([*parts[:length], node.module or "", wanted[0]]))
        return [node for node in body if not wanted or getattr(node, "name", None) == wanted[0]]
    raise AssertionError(f"{name} is nowhere under src/")


def problems(node: ast.stmt, inside: str = "") -> Iterator[str]:
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
        return
    name, doc = inside + node.name, ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        yield from [] if doc else [f"{name}: no docstring"]
        for part in node.body:
            yield from problems(part, f"{name}.")
        return
    marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
    if "overload" in marks:
        return
    taken = [*node.args.args, *node.args.kwonlyargs]
    taken += [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
    names = [each.arg for each in taken if each.arg not in ("self", "cls", "unsupported")]
    told = re.findall(r"^    \*{0,2}(\w+): ", doc.partition("Args:\n")[2].partition("\n\n")[0], re.MULTILINE)
    if not doc:
        yield f"{name}: no docstring"
    elif names != told:
        yield f"{name} takes {names}, its docstring has {told}"
    is_property = bool(marks & {"property", "cached_property"})
    returns = node.returns is not None and ast.unparse(node.returns).strip("'\"") not in OPEN
    if returns and names and not is_property and "Returns:\n" not in doc and "Yields:\n" not in doc:
        yield f"{name}: its docstring does not say what it returns"


@pytest.mark.parametrize("page, name", list(entries()))
def test_docstrings_are_complete(page: str, name: str) -> None:
    found = nodes(name)
    assert found, name
    assert [problem for node in found for problem in problems(node)] == []
