"""`residua budgets`: what a shared budget achieves at the same cost. Budgets are spent as a model spends them: all
heads of a layer in one call, layer after layer, step after step. Errors are those of the last step, when shared budgets
have settled; rows that a call computed exactly are left out."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...api import attention
from ...config import Config
from ...errors import InputError
from ...method.budget.shared import SharedBudget
from ...method.inputs import validate
from ...state import State
from ..capture.captures import CapturedCall
from ..metrics.row_error import relative_row_error
from ..reports import figure
from ..reports.page import Finding, Page, Picture
from ..reports.table import Table, pair, share
from .estimates import FACTOR, USUALLY, Estimates
from .study import Watch, curves_of, decided, make_page, models_of, watched
from .subject import dense_rows

DENSITIES = (0.02, 0.03, 0.05, 0.08)
PAPER_DENSITY = 0.22
STEPS = 3  # at least: in the first nothing is known, in the second little, in the third enough
PAPER = "the paper's"
# The paper is silent about group counts; these are what its authors run for every model. In short calls they
# are finer than ours, and the stronger form of the method (docs/decisions/0010).
FINER = "the paper's, 300 x 1000 groups"
PAPERS = (PAPER, FINER)
# By density: mean and p99 error at most so many times those of the paper's method at 22 %, in its stronger form.
WANTED = {0.08: (0.25, 0.5), 0.05: (0.5, 1.0), 0.03: (1.0, 2.0)}


@dataclass(frozen=True)
class Layer:
    """The calls of one layer in one branch, by step; heads in their order."""

    model: str
    name: str
    steps: tuple[tuple[CapturedCall, ...], ...]

    def load(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of all heads at a step; after the last recorded step that one is repeated.  # [1, H, N,
        D]"""
        heads = [call.load() for call in self.steps[min(step, len(self.steps) - 1)]]
        q, k, v = (torch.cat(parts, dim=1) for parts in zip(*heads, strict=True))
        return q, k, v

    @property
    def first(self) -> CapturedCall:
        return self.steps[-1][0]

    @cached_property
    def dense(self) -> Tensor:
        """Dense attention at the last step.  # [1, H, N, Dv] fp32"""
        return dense_rows(validate(*self.load(len(self.steps) - 1), scale=self.first.scale))[0]


@dataclass(frozen=True)
class HeadRun:
    """One head at the last step under one setting."""

    setting: str
    density: float
    head: str
    mean: float
    estimate: float | None
    cost: float


@dataclass(frozen=True)
class SettingRun:
    """All heads of a model under one setting: mean and p99 over all their rows."""

    setting: str
    density: float
    model: str
    mean: float
    p99: float
    cost: float
    heads: tuple[HeadRun, ...]

    @property
    def worst(self) -> HeadRun:
        return max(self.heads, key=lambda head: head.mean)


def fixed(density: float) -> str:
    return f"fixed @ {density:g}"


def shared(density: float) -> str:
    return f"shared @ {density:g}"


def settings(config: Config, densities: Sequence[float]) -> dict[str, Config]:
    """The settings to compare; `config` supplies backend and rules."""
    paper = Config.paper(density=PAPER_DENSITY, backend=config.backend, rules=config.rules)
    made = {PAPER: paper, FINER: paper.replace(query_groups=300, kv_groups=1000)}
    for density in densities:
        made[fixed(density)] = config.replace(density=density, balance=False)
        made[shared(density)] = config.replace(density=density, balance=True)
    return made


def layers_of(calls: Sequence[CapturedCall]) -> list[Layer]:
    """The captured heads, combined into the calls they came from."""
    found: dict[tuple[str, str, str], dict[int, list[CapturedCall]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        found[call.model, str(call.layer), call.branch][call.step or 0].append(call)
    made = []
    for (model, layer, branch), steps in found.items():
        name = f"L{layer} {branch}".strip()
        in_order = tuple(tuple(sorted(steps[step], key=lambda call: call.head)) for step in sorted(steps))
        shapes = {(call.tokens, call.keys, call.head_dim) for heads in in_order for call in heads}
        if len(shapes) > 1 or len({len(heads) for heads in in_order}) > 1:
            raise InputError(
                f"{model} {name}: heads of different shapes, or other heads from step to step; capture the "
                "same heads of one run, such as --heads 0,1 --steps 4,5,6"
            )
        if in_order[0][0].text or in_order[0][0].text_queries:
            raise InputError(f"{model} {name}: there are text tokens; this study only takes video tokens")
        made.append(Layer(model, name, in_order))
    return made


@torch.no_grad()
def run(layers: Sequence[Layer], setting: str, config: Config) -> SettingRun:
    """Runs all layers of one model, step after step; returns the errors of the last step."""
    budget = SharedBudget()
    states = [State(budget) for _ in layers]
    last = max(STEPS, *(len(layer.steps) for layer in layers)) - 1
    for step in range(last):
        for layer, state in zip(layers, states, strict=True):
            attention(*layer.load(step), config, state, scale=layer.first.scale)
    heads, rows = [], []
    for layer, state in zip(layers, states, strict=True):
        out, receipt = attention(*layer.load(last), config, state, scale=layer.first.scale, return_receipt=True)
        errors = relative_row_error(out, layer.dense)[0]  # [H, N]
        counted = torch.ones_like(errors, dtype=torch.bool)
        if receipt.probe_rows is not None:
            counted.scatter_(-1, receipt.probe_rows[0], False)
        beside = sum((work[0] for work in receipt.beside.values()), torch.zeros(len(errors)))
        costs = (receipt.per_head.total[0] + beside) / receipt.per_head.possible[0]
        for number, call in enumerate(layer.steps[-1]):
            told = None if receipt.error_per_head is None else float(receipt.error_per_head[0, number])
            rows.append(errors[number][counted[number]])
            name = f"{layer.name} H{call.head}"
            heads.append(HeadRun(setting, config.density, name, float(rows[-1].mean()), told, float(costs[number])))
    every = torch.cat(rows)
    p99 = every.kthvalue(max(1, -(-99 * every.numel() // 100))).values
    cost = sum(head.cost for head in heads) / len(heads)
    return SettingRun(setting, config.density, layers[0].model, float(every.mean()), float(p99), cost, tuple(heads))


def measure(
    calls: Sequence[CapturedCall], config: Config, densities: Sequence[float], watch: Watch | None = None
) -> list[SettingRun]:
    """Every setting on every model."""
    by_model: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers_of(calls):
        by_model[layer.model].append(layer)
    work = [(layers, *item) for layers in by_model.values() for item in settings(config, densities).items()]
    return [run(*piece) for piece in watched(work, watch, lambda piece: f"{piece[0][0].model}, {piece[1]}")]


def compare_budgets(
    calls: Sequence[CapturedCall], config: Config, command: str, quick: bool = False, watch: Watch | None = None
) -> Page:
    densities = (0.05,) if quick else DENSITIES
    results = measure(calls, config, densities, watch)
    return make_page(
        calls,
        calls,
        config,
        results,
        findings(results),
        {
            "calls": f"{len(calls)} captured heads; all heads of a layer in one call, warm, at the last "
            f"captured step; at least {STEPS} steps",
            "density": f"{', '.join(share(density, 0) for density in densities)} all in; the paper's "
            f"{share(PAPER_DENSITY, 0)} exact pairs",
        },
        title="One budget for all heads",
        lead="Two ways to spend the same total budget: every head gets the same density, or heads share the budget and "
        "pairs go where they reduce the error most.",
        command=command,
        tables=[budget_table(results, model) for model in models_of(results)],
        pictures=[_picture(results)],
    )


def estimates(runs: Sequence[SettingRun]) -> Estimates | None:
    """Estimated over true error of the heads of anchored runs."""
    ours = [item for item in runs if item.setting not in PAPERS]
    return Estimates.of([(head.mean, head.estimate) for item in ours for head in item.heads])


def budget_table(results: Sequence[SettingRun], model: str) -> Table:
    rows = []
    for item in results:
        if item.model == model:
            found = estimates([item])
            told = ("-", "-") if found is None else (f"{found.median:.2f}", share(found.within, 0))
            worst = f"{item.worst.mean:.4f} ({item.worst.head})"
            rows.append((item.setting, pair(item.mean, item.p99), worst, share(item.cost), *told))
    columns = ("setting", "mean / p99", "worst head", "cost", "median est/true", f"within {FACTOR:g} x")
    note = (
        "Relative row error over the rows of all heads that were not probed; the worst head by its mean. "
        "Cost: all work of the receipts but grouping, as a share of dense attention."
    )
    return Table(f"Budgets, {model}", columns, tuple(rows), note)


def findings(results: Sequence[SettingRun]) -> list[Finding]:
    found = []
    for density, (mean, p99) in WANTED.items():
        claim = (
            f"Shared, {share(density, 0)} in all: at most {mean:g} x the mean error of the paper's method at "
            f"{share(PAPER_DENSITY, 0)}, and {p99:g} x its p99"
        )
        ours_of = [item for item in results if item.setting == shared(density)]
        both = [(ours, _strongest_paper(results, ours.model)) for ours in ours_of]
        if not both:
            found.append(Finding(claim, None, "not measured"))
            continue
        evidence = "; ".join(
            f"{ours.model}: mean {ours.mean / paper.mean:.2f} x, p99 {ours.p99 / paper.p99:.2f} x of {paper.setting}"
            for ours, paper in both
        )
        kept = [ours.mean <= mean * paper.mean and ours.p99 <= p99 * paper.p99 for ours, paper in both]
        found.append(decided(claim, kept, evidence))
    return [*found, _sharing(results), _estimating(results)]


def _strongest_paper(results: Sequence[SettingRun], model: str) -> SettingRun:
    return min((x for x in results if x.model == model and x.setting in PAPERS), key=lambda item: item.mean)


def _sharing(results: Sequence[SettingRun]) -> Finding:
    claim = "A shared budget has less mean error than the same density for every head, at no more cost"
    by_setting = {(item.model, item.setting): item for item in results}
    sharing = [item for item in results if item.setting == shared(item.density)]
    both = [(ours, by_setting[ours.model, fixed(ours.density)]) for ours in sharing]
    evidence = "; ".join(
        f"{share(ours.density, 0)}: {ours.mean:.4f} against {other.mean:.4f} (cost {share(ours.cost)} and "
        f"{share(other.cost)})"
        for ours, other in both
    )
    return decided(claim, [o.mean < other.mean and o.cost <= 1.02 * other.cost for o, other in both], evidence)


def _estimating(results: Sequence[SettingRun]) -> Finding:
    claim = f"Heads know their error within a factor of {FACTOR:g} in nine of ten cases"
    found = estimates(results)
    if found is None:
        return Finding(claim, None, "no estimates")
    return Finding(claim, found.within >= USUALLY, str(found))


def _picture(results: Sequence[SettingRun]) -> Picture:
    names = {
        "shared budget": "shared",
        "the same for each head": "fixed",
        "the paper's at 22 %": PAPER,
        "the paper's at 22 %, 300 x 1000 groups": FINER,
    }

    def curve(title: str, model: str, place: int) -> list[tuple[float, float]]:
        runs = [item for item in results if item.model == model and item.setting.split(" @")[0] == names[title]]
        return sorted((100 * item.cost, (item.mean, item.p99)[place]) for item in runs)

    panels = curves_of(models_of(results), names, curve)
    drawing = figure.curves(panels, "cost, % of dense attention", "row error", log=True, residua=["shared budget"])
    return Picture("budgets", "Error over cost", "Over the rows of all heads.", drawing)
