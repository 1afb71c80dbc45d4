"""Plans as tables."""

import io

import pytest

from residua.tools.plan import make_plan

rich_console = pytest.importorskip("rich.console")


def text(*request: object, **more: object) -> str:
    from residua.tools.plan.render import render

    console = rich_console.Console(file=io.StringIO(), width=120, color_system=None)
    console.print(render(make_plan(*request, **more)))  # type: ignore[arg-type]
    return console.file.getvalue()


def test_a_paper_setting_shows_the_comparison_and_the_assumptions() -> None:
    shown = text("wan2.2-i2v-a14b", "1280x720", 81, 50, 0.22, "h100", paper=True)
    for part in ("75,600", "652.34", "658.46", "-0.9%", "1.80 x", "assumptions", "FLOPs: 2 per multiply-add"):
        assert part in shown


@pytest.mark.parametrize("gpu", ["h100", "a100", "4090", "b200", "cpu"])
def test_every_machine_renders(gpu: str) -> None:
    assert "worth it" in text("world", gpu=gpu)


def test_it_says_what_is_planned_and_whether_it_fits() -> None:
    shown = " ".join(text("wan2.2", gpu="rtx4090", offload="model").split())
    for part in (
        'quality "balanced"',
        "no step and no layer is dense by rule",
        "does not fit",
        "--offload sequential",
        "weights to the GPU",
    ):
        assert part in shown
    assert "by the rates of the machine" in " ".join(text("wan2.2", gpu="rtx6000-ada").split())
    assert "the paper's method" in text("wan2.2", paper=True)


def test_not_worth_it_is_said() -> None:
    assert "not worth it here" in text("world", "32x32", 8)
