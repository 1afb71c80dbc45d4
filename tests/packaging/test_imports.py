"""Every module can be imported: mypy takes a wrong relative import for a package that is not installed."""

import importlib
from pathlib import Path

import pytest

import residua

ROOT = Path(residua.__file__).parent
FILES = sorted(path.relative_to(ROOT.parent).with_suffix("") for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("name", [".".join(path.parts).removesuffix(".__init__") for path in FILES])
def test_a_module_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if (missing.name or "residua").partition(".")[0] == "residua":
            raise
        pytest.skip(f"needs {missing.name}")
