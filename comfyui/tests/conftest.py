"""Loads the node package as ComfyUI does: from its folder, under a name of the host's choice."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1]
NAME = "residua_comfyui"


def load_package() -> ModuleType:
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            NAME, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[NAME]


def load_helper(name: str) -> ModuleType:
    full = f"{NAME}_tests_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[full] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]


load_package()


@pytest.fixture(scope="session")
def package() -> ModuleType:
    return load_package()


@pytest.fixture(scope="session")
def checks() -> ModuleType:
    return load_helper("checks")


@pytest.fixture(scope="session")
def host():
    return load_helper("standin").StandIn()
