"""The studies of captured calls: `residua analyze`, `ablate`, `reconstructions`, `budgets` and `baselines`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ...errors import InputError
from .app import command, console, show
from .options import BackendName, ForceFolder, command_line, words

if TYPE_CHECKING:
    from ...config import Config
    from ..reports.page import Page

ANALYSIS = Path("residua-analyze")
ABLATION = Path("residua-ablate")
RECONSTRUCTION = Path("residua-reconstructions")
BUDGETS = Path("residua-budgets")
BASELINES = Path("residua-baselines")
WRITTEN_AGAIN = (ANALYSIS, ABLATION, RECONSTRUCTION, BUDGETS)  # without --force, if Residua wrote them

Captures = Annotated[Path, typer.Argument(help="Folder that `residua capture` wrote.")]
Density = Annotated[float, typer.Option(help="Share of the pairs that may be evaluated.")]
Groups = Annotated[int | None, typer.Option(min=1, help="Default: chosen from the number of tokens.")]
RulesName = Annotated[str | None, typer.Option("--rules", help="cpu or gpu; default: those of the device.")]
Out = Annotated[Path, typer.Option(help="Folder for the report.")]


@dataclass(frozen=True)
class StudyOptions:
    """Settings of the method in a study, and how much is measured."""

    density: Density = 0.22
    query_groups: Groups = None
    kv_groups: Groups = None
    backend: BackendName = "auto"
    rules: RulesName = None
    quick: Annotated[bool, typer.Option("--quick", help="Four calls and fewer settings.")] = False

    def settings(self) -> dict[str, Any]:
        """Keywords of a Config."""
        return _given(
            density=self.density,
            query_groups=self.query_groups,
            kv_groups=self.kv_groups,
            backend=self.backend,
            rules=self.rules,
        )


@command(epilog="Example:  residua analyze captures --out residua-analyze")
def analyze(
    context: typer.Context, captures: Captures, study: StudyOptions, out: Out = ANALYSIS, force: ForceFolder = False
) -> None:
    """Measure support, kept mass against error, and affine residuals (the paper's section 3)."""
    from ...config import Config
    from ..studies.diagnostics import analyze as analysis

    _run(analysis, context, captures, Config.paper(**study.settings()), study.quick, out, force)


@command(epilog="Example:  residua ablate captures --out residua-ablate")
def ablate(
    context: typer.Context, captures: Captures, study: StudyOptions, out: Out = ABLATION, force: ForceFolder = False
) -> None:
    """Measure partition, reconstruction, density, probes and k-means steps (the paper's Tables 2-4)."""
    from ...config import Config
    from ..studies.ablations import ablate as ablation

    _run(ablation, context, captures, Config.paper(**study.settings()), study.quick, out, force)


@command(epilog="Example:  residua reconstructions captures --out residua-reconstructions")
def reconstructions(
    context: typer.Context,
    captures: Captures,
    study: StudyOptions,
    out: Out = RECONSTRUCTION,
    force: ForceFolder = False,
) -> None:
    """Compare reconstructions at equal cost, the parts of "anchored", and the estimates of the error."""
    from ...config import Config
    from ..studies.reconstructions import compare_reconstructions

    _run(compare_reconstructions, context, captures, Config(**study.settings()), study.quick, out, force)


@command(epilog="Example:  residua budgets captures --out residua-budgets")
def budgets(
    context: typer.Context,
    captures: Captures,
    backend: BackendName = "auto",
    rules: RulesName = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only one budget.")] = False,
    out: Out = BUDGETS,
    force: ForceFolder = False,
) -> None:
    """Compare one budget shared by all heads with the same density for each, at 2 to 8 % on average."""
    from ...config import Config
    from ..studies.budgets import compare_budgets

    _run(compare_budgets, context, captures, Config(**_given(backend=backend, rules=rules)), quick, out, force)


@command(epilog="Example:  residua baselines captures/ --density 0.22 --methods svg2,svg-ear,paper --quick")
def baselines(
    context: typer.Context,
    captures: Annotated[Path, typer.Argument(help="Captured calls: safetensors, with or without a manifest.")],
    density: Density = 0.22,
    methods: Annotated[str | None, typer.Option(help="Comma separated; default: all.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each method; the median counts.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: PyTorch's.")] = None,
    backend: Annotated[str, typer.Option(help="Attention backend for all methods, or auto.")] = "auto",
    rules: RulesName = None,
    groups: Annotated[str | None, typer.Option(help="Query and K/V groups of all methods, such as 64,128.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="At most 4 calls.")] = False,
    out: Out = BASELINES,
    force: ForceFolder = False,
) -> None:
    """Compare training-free sparse attention at matched density: error, pairs, products and time."""
    import torch

    from ...config import Config
    from ..studies.baselines import chosen_methods, compare_baselines

    chosen = chosen_methods(None if methods is None else words("methods", methods))
    query_groups, kv_groups = (None, None) if groups is None else _two_counts(groups)
    given = _given(density=density, query_groups=query_groups, kv_groups=kv_groups, backend=backend, rules=rules)
    if threads is not None:
        torch.set_num_threads(threads)
    _run(compare_baselines, context, captures, Config(**given), quick, out, force, methods=chosen, repeats=repeats)


def _two_counts(groups: str) -> tuple[int, int]:
    parts = words("groups", groups)
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--groups {groups!r}: wanted two whole numbers, such as 64,128")
    return int(parts[0]), int(parts[1])


def _given(**settings: Any) -> dict[str, Any]:
    """Without what is left to the Config."""
    return {name: value for name, value in settings.items() if value is not None}


def _run(
    study: Callable[..., Page],
    context: typer.Context,
    captures: Path,
    config: Config,
    quick: bool,
    out: Path,
    force: bool,
    **more: Any,
) -> None:
    """Reads captures, studies them, prints tables and findings, and writes everything to the folder."""
    from ..capture.captures import read_captures
    from ..output import check_folder, publish_folder
    from .progress import call_bar

    check_folder(out, force, reuse=out in WRITTEN_AGAIN)
    calls = read_captures(captures)
    with call_bar() as watch:
        page = study(calls, config, f"{command_line(context)} {captures.name}", quick, watch, **more)
    publish_folder(out, page.files())
    for table in page.tables:
        show(table.rich())
        console.print()
    for warning in page.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}")
    for item in page.findings:
        colour = {"confirmed": "green", "contradicted": "red"}.get(item.verdict, "yellow")
        console.print(f"[{colour}]{item.verdict}[/{colour}]  {escape(item.claim)}: {escape(item.evidence)}")
    console.print(f"wrote {out}/ : open {out / 'report.html'} in a browser", soft_wrap=True, markup=False)
