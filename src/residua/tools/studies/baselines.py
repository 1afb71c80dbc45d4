"""`residua baselines`: every method on every call with the same budget of pairs: error against dense attention, pairs,
products, time."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median

import torch

from ...baselines import METHODS, Method, Outcome, Task
from ...baselines.task import attend_all
from ...config import Config
from ...types import Rows
from ..capture.captures import CapturedCall
from ..metrics.row_error import row_errors
from ..reports import figure
from ..reports.page import Finding, Page, Picture
from ..reports.table import Table, share
from .study import QUICK_CALLS, Watch, models_of, watched

WARM_UP_TOKENS = 512
PAPER, OURS = "paper", "anchored"
VARIANTS = ("authors", "tail")  # of these two; compared in other studies, here only if they are asked for
ERROR_COLUMNS = ("method", "mean", "p99", "held-out mean", "p99", "won")
ERROR_NOTE = (
    "norm(out - dense) / norm(dense) per row, averaged over calls. Held-out: rows that no method "
    "has probed. Won: calls with a lower mean error than SparsePR's on those rows."
)
COST_NOTE = (
    "Charged: what counts against the target. Density: exact query-key pairs. Skipped mass: attention that "
    "the kept cells miss. Beside: products for prediction and compensation; grouping: products of k-means "
    "from a cold start; both as shares of the pairs of dense attention, reported and not charged. Anchored "
    "is charged for what is beside its pairs. CPU ms: the whole method, median over calls."
)


@dataclass(frozen=True)
class Measurement:
    """One method on one call. Shares are relative to the pairs of dense attention."""

    model: str
    call: str
    method: str
    density: float  # exact pairs
    pairs: int
    parts: dict[str, int]  # the pairs by purpose
    beside: float  # products for prediction and compensation
    charged: float  # what counts against the target: exact pairs, and with all-in the other products
    grouping: float  # products for grouping
    products: dict[str, int]
    mean: float  # relative row error, all rows
    p99: float
    held_out_mean: float  # rows that no method of the study has probed
    held_out_p99: float
    skipped_mass: float | None  # mean over rows; None if the method has no cells of its own
    cpu_seconds: float  # process time of the whole method, grouping included
    seconds: float  # the same as wall-clock time
    backend: str


@dataclass(frozen=True)
class Refusal:
    """A method that cannot compute a call, and the reason."""

    model: str
    method: str
    reason: str


def chosen_methods(names: Sequence[str] | None) -> list[Method]:
    """The methods of these names, in their order; by default all but variants of Residua's own."""
    return [METHODS[name] for name in dict.fromkeys(names or (name for name in METHODS if name not in VARIANTS))]


def task_of(captured: CapturedCall, config: Config) -> Task:
    """The call restricted to its video tokens. Text tokens are left out as rows and as keys: methods treat them
    differently, and only the routing of the rest is compared here."""
    q, k, v = captured.load()
    rows = Rows(captured.text_queries or ()).complement(q.shape[2])
    keys = Rows(captured.text or ()).complement(k.shape[2])
    heads_per_kv = q.shape[1] // k.shape[1]
    q, k, v = rows.take(q, 2), keys.take(k, 2), keys.take(v, 2)
    k, v = (x.repeat_interleave(heads_per_kv, dim=1).contiguous() for x in (k, v))
    return Task(q.contiguous(), k, v, config, captured.scale, captured.grid)


def timed(method: Method, task: Task, repeats: int) -> tuple[Outcome, float, float]:
    """The outcome, and the median CPU and wall-clock time of some runs, each from scratch. Other work on the machine
    affects CPU time the least."""
    runs = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = method.run(task)
        runs.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = (median(column) for column in zip(*runs, strict=True))
    return outcome, cpu, wall


def measure(
    captured: CapturedCall, methods: Sequence[Method], config: Config, repeats: int = 1
) -> Iterator[Measurement | Refusal]:
    """All methods on one call, in turn."""
    with torch.no_grad():
        task = task_of(captured, config)
        dense, lse = attend_all(task.backend, task.q, task.k, task.v, task.scale)
        done = []
        for method in methods:
            reason = method.refuses(task)
            if reason:
                yield Refusal(captured.model, method.name, reason)
            else:
                done.append((method, *timed(method, task, repeats)))
        # rows that some method computed exactly are left out for all methods
        probed = [outcome.probe_rows for _, outcome, *_ in done if outcome.probe_rows is not None]
        probes = torch.cat(probed, -1) if probed else None
        for method, outcome, cpu, wall in done:
            mean, p99 = row_errors(outcome.out, dense)
            held_out_mean, held_out_p99 = row_errors(outcome.out, dense, probes)
            skipped = None if outcome.lse is None else float((1 - (outcome.lse - lse).exp()).clamp(min=0).mean())
            beside = sum(count for name, count in outcome.products.items() if name != "grouping")
            yield Measurement(
                model=captured.model,
                call=captured.name,
                method=method.name,
                density=outcome.executed / task.possible,
                pairs=outcome.executed,
                parts=outcome.pairs,
                beside=beside / task.possible,
                charged=(outcome.executed + (beside if outcome.all_in else 0)) / task.possible,
                grouping=outcome.products.get("grouping", 0) / task.possible,
                products=outcome.products,
                mean=mean,
                p99=p99,
                held_out_mean=held_out_mean,
                held_out_p99=held_out_p99,
                skipped_mass=skipped,
                cpu_seconds=cpu,
                seconds=wall,
                backend=task.backend.name,
            )


def warm_up(captured: CapturedCall, methods: Sequence[Method], config: Config) -> None:
    """Runs everything once on a few tokens, so that no method pays for one-time work of the process."""
    task = task_of(captured, config.replace(query_groups=None, kv_groups=None))
    few = slice(0, WARM_UP_TOKENS)
    task = replace(task, q=task.q[:, :, few], k=task.k[:, :, few], v=task.v[:, :, few], grid=None)
    with torch.no_grad():
        for method in methods:
            if not method.refuses(task):
                method.run(task)


def measure_all(
    calls: Sequence[CapturedCall],
    methods: Sequence[Method],
    config: Config,
    repeats: int = 1,
    watch: Watch | None = None,
) -> tuple[list[Measurement], list[Refusal]]:
    """Every method on every call."""
    warm_up(calls[0], methods, config)
    both = [item for captured in watched(calls, watch) for item in measure(captured, methods, config, repeats)]
    refused = {(item.model, item.method): item for item in both if isinstance(item, Refusal)}
    return [item for item in both if isinstance(item, Measurement)], list(refused.values())


def by_method(found: Sequence[Measurement], model: str) -> dict[str, list[Measurement]]:
    """The measurements of a model by method, in the order of the methods."""
    mine = [item for item in found if item.model == model]
    return {name: [item for item in mine if item.method == name] for name in dict.fromkeys(i.method for i in mine)}


def average(items: Sequence[Measurement], name: str) -> float:
    return fmean(getattr(item, name) for item in items)


def won(method: str, items: Sequence[Measurement], paper: Sequence[Measurement]) -> str:
    """In how many calls a method has less error than SparsePR."""
    theirs = {item.call: item.held_out_mean for item in paper}
    if method == PAPER or METHODS[method].reference or not theirs:
        return ""
    both = [item for item in items if item.call in theirs]
    return f"{sum(item.held_out_mean < theirs[item.call] for item in both)} of {len(both)}"


def error_table(found: Sequence[Measurement], refused: Sequence[Refusal], model: str) -> Table:
    names, methods = ("mean", "p99", "held_out_mean", "held_out_p99"), by_method(found, model)
    rows = []
    for method, items in methods.items():
        errors = [f"{average(items, name):.4f}" for name in names]
        rows.append((METHODS[method].title, *errors, won(method, items, methods.get(PAPER, []))))
    calls = len({item.call for item in found if item.model == model})
    left_out = [f"Not run: {METHODS[r.method].title}: {r.reason}." for r in refused if r.model == model]
    note = " ".join([ERROR_NOTE, *left_out])
    return Table(f"{model}, {calls} calls: error", ERROR_COLUMNS, tuple(rows), note, METHODS[OURS].title)


def cost_table(found: Sequence[Measurement], model: str, target: float) -> Table:
    methods = by_method(found, model)
    masses = [[i.skipped_mass for i in items if i.skipped_mass is not None] for items in methods.values()]

    def averages(name: str, digits: int) -> list[str]:
        return [share(average(items, name), digits) for items in methods.values()]

    columns = {
        "charged": averages("charged", 2),
        "density": averages("density", 2),
        "skipped mass": [share(fmean(mass)) if mass else "" for mass in masses],
        "beside": averages("beside", 1),
        "grouping": averages("grouping", 0),
        "CPU ms": [f"{1e3 * median(item.cpu_seconds for item in items):.0f}" for items in methods.values()],
    }
    names, note = [METHODS[method].title for method in methods], " ".join([COST_NOTE, *over_target(methods, target)])
    return Table.filled(f"{model}: cost", "method", names, columns, note, METHODS[OURS].title)


def over_target(methods: Mapping[str, Sequence[Measurement]], target: float) -> Iterator[str]:
    """Notes about calls above the target: every query group keeps at least one cell, which can exceed a small budget on
    a short call."""
    for method, items in methods.items():
        over = [item.charged for item in items if item.charged > target + 1e-9]
        if over and method != "dense":
            most = f"in {len(over)} of {len(items)} calls, by {share(max(over) - target, 2)} at most"
            yield f"Above the target: {METHODS[method].title} {most}."


def findings(found: Sequence[Measurement]) -> list[Finding]:
    """Per model: whether the paper's method has the smallest error of the published ones, and anchored reconstruction
    that of all usable ones."""
    made = []
    for model in models_of(found):
        usable = {name: items for name, items in by_method(found, model).items() if not METHODS[name].reference}
        errors = {method: average(items, "held_out_mean") for method, items in usable.items()}
        published = {method: error for method, error in errors.items() if method not in (OURS, *VARIANTS)}
        made += [*_smallest(model, PAPER, published, "baseline"), *_smallest(model, OURS, errors, "other method")]
    return made


def _smallest(model: str, method: str, errors: dict[str, float], kind: str) -> list[Finding]:
    others = {name: error for name, error in errors.items() if name != method}
    if method not in errors or not others:
        return []
    best = min(others, key=others.__getitem__)
    evidence = f"{errors[method]:.4f}; the best {kind} is {METHODS[best].title} with {others[best]:.4f}"
    name = METHODS[method].title.partition(" (")[0]
    whom = " of the published methods" if method == PAPER else ", everything charged"
    claim = f"{model}: {name} has the lowest mean error on held-out rows{whom}"
    return [Finding(claim, errors[method] <= others[best], evidence)]


def picture(found: Sequence[Measurement]) -> Picture:
    """Errors as bars, the best at the top, a panel per model, with the CPU time at each; without dense attention, which
    has no error."""
    measured = [item for item in found if item.method != "dense"]
    panels = {
        model: [_bar(METHODS[method], items) for method, items in by_method(measured, model).items()]
        for model in models_of(found)
    }
    references = [method.title for method in METHODS.values() if method.reference]
    caption = (
        "Mean over the calls of a model, on rows that no method has probed; CPU time of the whole method. "
        "Blue: Residua's own method, which is charged for everything. Light: not a method that could be run."
    )
    drawing = figure.ranked(panels, "mean relative row error", METHODS[OURS].title, references)
    return Picture("baselines", "Error at the same density", caption, drawing)


def _bar(method: Method, items: Sequence[Measurement]) -> tuple[str, float, str]:
    error, milliseconds = average(items, "held_out_mean"), 1e3 * median(item.cpu_seconds for item in items)
    return method.title, error, f"{error:.4f}" + ("" if method.reference else f", {milliseconds:.0f} ms")


def compare_baselines(
    calls: Sequence[CapturedCall],
    config: Config,
    command: str,
    quick: bool = False,
    watch: Watch | None = None,
    *,
    methods: Sequence[Method],
    repeats: int,
) -> Page:
    chosen = calls[:: -(-len(calls) // QUICK_CALLS)] if quick else calls
    found, refused = measure_all(chosen, methods, config, repeats, watch)
    names = list(dict.fromkeys(item.method for item in found))
    groups = (config.query_groups, config.kv_groups)
    tables: list[Table] = []
    for model in models_of(found):
        tables += [error_table(found, refused, model), cost_table(found, model, config.density)]
    return Page(
        title=f"Training-free methods at {config.density:.0%} of the pairs",
        lead=(
            f"{len(names)} methods on {len({(item.model, item.call) for item in found})} recorded calls, each with "
            "the same budget of exact query-key pairs, the same group counts and the same attention backend; "
            "anchored pays for all its work from that budget. All but SDPA are research code in PyTorch around "
            "that backend: their times compare with each other, not with the authors' kernels."
        ),
        command=command,
        tables=tables,
        pictures=[picture(found)] if set(names) - {"dense"} else [],
        findings=findings(found),
        facts={
            "target": f"{config.density:g}",
            "repeats": f"{repeats}, the median is reported",
            "threads": str(torch.get_num_threads()),
            "groups": "as many as Residua takes" if groups == (None, None) else str(groups),
            "backend": ", ".join(sorted({item.backend for item in found})),
            **{METHODS[n].title: f"{METHODS[n].source}. Simplified: {METHODS[n].simplified}." for n in names},
        },
        data={"measurements": [asdict(item) for item in found], "refused": [asdict(item) for item in refused]},
    )
