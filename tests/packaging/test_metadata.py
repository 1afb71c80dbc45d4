"""What is said in more than one file is said the same way in each."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import residua

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(line.split("==")[0]): Version(line.split("==")[1]) for line in lines}


def requirements(*extras: str) -> dict[str, Requirement]:
    """What pyproject.toml asks for, the package's own extras left out."""
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    wanted = [Requirement(line) for lines in lists for line in lines]
    return {canonicalize_name(one.name): one for one in wanted if one.name != "residua"}


def test_citation_has_the_package_version() -> None:
    assert f"\nversion: {residua.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_pinned_versions_are_allowed_and_complete() -> None:
    pinned = pins("constraints.txt")
    for name, wanted in requirements("cli", "diffusers", "lab", "evaluate", "dev", "docs").items():
        assert wanted.specifier.contains(pinned[name]), f"constraints.txt: {name}=={pinned[name]}, {wanted}"


def test_what_ci_installs_has_hashes_and_the_pinned_versions() -> None:
    text = (ROOT / "requirements-ci.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    locked: dict[str, Version] = {}
    for line in lines:
        found = re.fullmatch(r"(\S+)==(\S+) +--hash=sha256:[0-9a-f]{64}", line)
        assert found is not None, line
        locked[canonicalize_name(found[1])] = Version(found[2])
    pinned = pins("constraints.txt")
    builds = {"setuptools"}  # not pinned: any version that pyproject.toml allows builds the package
    others = {"tomli"}  # older Pythons
    assert locked.keys() - builds == pinned.keys() - others, "run tests/packaging/lock.py"
    for name in pinned.keys() & locked.keys():
        assert Version(locked[name].public) == pinned[name], f"{name}: run tests/packaging/lock.py"


def test_oldest_versions_are_the_lower_bounds() -> None:
    oldest = pins("constraints-oldest.txt")
    for name, wanted in requirements("cli", "diffusers", "lab").items():
        bound = next(clause.version for clause in wanted.specifier if clause.operator == ">=")
        assert wanted.specifier.contains(oldest[name])
        release = oldest[name].release[: len(Version(bound).release)]
        assert release == Version(bound).release, f"{name}: {bound} is claimed, {oldest[name]} is tested"


@pytest.mark.parametrize("template", ["bug.yml", "gpu.yml", "model.yml"])
def test_issue_templates_ask_for_the_doctor(template: str) -> None:
    assert "residua doctor --json" in (ROOT / ".github" / "ISSUE_TEMPLATE" / template).read_text()


def test_every_make_target_of_the_workflows_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        for target in re.findall(r"run: make ([\w-]+)", workflow.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{workflow.name}: make {target}"
