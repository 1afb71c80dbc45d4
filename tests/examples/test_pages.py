"""The notebook and the tutorial do what they show."""

import ast
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d+\.\d+")


def notebook_cells() -> list[str]:
    cells = json.loads((ROOT / "examples" / "first_hour.ipynb").read_text())["cells"]
    assert all(cell["outputs"] or "def " in "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def tutorial_blocks() -> list[tuple[str, list[str]]]:
    """The tutorial's code on tensors, each block with the lines that it says are printed."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```\n\n((?:    [^\n]+\n)*)", text, re.DOTALL)
    return [(code, textwrap.dedent(shown).splitlines()) for code, shown in blocks if "pipe" not in code]


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    names: dict[str, object] = {"__name__": "notebook"}
    for source in notebook_cells():
        # eight frames instead of sixteen: the same code in half the time
        exec(compile(source.replace("num_frames=16", "num_frames=8"), "first_hour.ipynb", "exec"), names)
    printed = capsys.readouterr().out
    assert "identical to the dense video: True" in printed
    assert "blocks.0.attn1" in printed


def test_the_tutorial_prints_what_it_shows(capsys: pytest.CaptureFixture) -> None:
    names: dict[str, object] = {}
    blocks = tutorial_blocks()
    assert len(blocks) == 3
    for code, shown in blocks:
        exec(compile(code, "tutorial.md", "exec"), names)
        printed = capsys.readouterr().out.strip().splitlines()
        assert len(printed) == len(shown), printed
        for is_, said in zip(printed, shown, strict=True):
            assert NUMBER.sub("", is_) == NUMBER.sub("", said)
            numbers = [float(number) for number in NUMBER.findall(said)]
            # wide: the page shows the order of the numbers, and processors round differently
            assert [float(number) for number in NUMBER.findall(is_)] == pytest.approx(numbers, rel=0.4)


def fenced(language: str) -> list[tuple[str, str]]:
    """Every block of that language in the pages, with the name of its page."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [(page.name, textwrap.dedent(block)) for page in pages for block in pattern.findall(page.read_text())]


@pytest.mark.parametrize("page, block", fenced("python"))
def test_python_in_the_pages_compiles(page: str, block: str) -> None:
    compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page, block", fenced("toml"))
def test_toml_in_the_pages_is_valid(page: str, block: str) -> None:
    assert tomllib.loads(block)


@pytest.mark.parametrize("page, block", fenced("bash"))
def test_shell_scripts_in_the_pages_are_valid(page: str, block: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_kuberay_job_is_one() -> None:
    yaml = pytest.importorskip("yaml")
    [job] = [yaml.safe_load(block) for page, block in fenced("yaml") if page == "evaluate.md"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        [container] = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    folder = groups[0]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPath"]
    assert f"--out {folder}/" in job["spec"]["entrypoint"]
