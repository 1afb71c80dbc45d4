"""The table of tokens and gains in the documentation is what the plan gives."""

from pathlib import Path

from residua.tools.plan import MODELS
from residua.tools.plan.table import table

PAGE = Path(__file__).parents[3] / "docs" / "pipelines.md"


def test_the_page_shows_the_table_of_today() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "python -m residua.tools.plan.table prints the new one"


def test_every_model_with_a_name_has_its_line() -> None:
    lines = table().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split("`")[1] for line in lines[2:]] == [name for name in MODELS if name != "world"]
