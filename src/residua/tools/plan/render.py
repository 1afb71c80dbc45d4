"""A plan as rich tables."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .plan import Plan


def render(plan: Plan) -> RenderableType:
    """Everything that `Plan.to_dict` says, as tables."""
    style = "bold green" if plan.worth_it else "bold yellow"
    parts: list[RenderableType] = [_request(plan), _costs(plan)]
    if plan.paper is not None:
        parts.append(_paper(plan))
    parts.append(Text(plan.verdict, style=style))
    if plan.memory.fits is False:
        parts.append(Text(plan.memory.verdict, style="bold yellow"))
    parts += [Text(f"note: {note}") for note in plan.notes]
    parts += [Text("assumptions", style="bold"), *(Text(f"- {line}", style="dim") for line in plan.assumptions)]
    return Group(*parts)


def _request(plan: Plan) -> Table:
    width, height = plan.size
    title = f"{plan.model.name}: {width}x{height}, {plan.frames} frames, {plan.steps} steps, {plan.machine.label}"
    table = _table(title, "what", "how much")
    schedule, model = plan.schedule, plan.model
    rows = (
        ("planned", plan.method),
        ("tokens", f"{plan.tokens:,} ({' x '.join(map(str, plan.grid))}), and {model.text_tokens} of text"),
        ("attention", f"{model.layers} layers x {model.heads} heads ({model.kv_heads} K/V) x {model.head_dim}"),
        ("groups per head", f"{plan.call.query_groups} of queries, {plan.call.kv_groups} of keys"),
        (
            "cost of a sparse call" if plan.config.summarises else "density of a sparse call",
            f"{plan.call.density:.3f} of dense attention, {plan.call.probes} probe rows per head in it",
        ),
        (
            "attention calls",
            f"{schedule.sparse_calls:,} sparse, {schedule.dense_calls:,} dense"
            + (f" ({schedule.first_dense})" if schedule.first_dense else ""),
        ),
        (f"attention in all, of {'dense' if plan.config.summarises else 'all pairs'}", f"{plan.evaluated:.3f}"),
        ("memory of the method", f"{_bytes(plan.call_bytes)} during a call, {_bytes(plan.state_bytes)} kept"),
        (
            f"GPU memory, offload {plan.memory.offload}",
            f"{_bytes(plan.memory.weights)} weights, {_bytes(plan.memory.activations)} activations; "
            f"{plan.memory.verdict}",
        ),
    )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _costs(plan: Plan) -> Table:
    seconds, evaluated = plan.seconds, plan.evaluated * plan.attention_pflops
    table = _table("cost of the video", "part", "PFLOPs dense", "PFLOPs sparse", "dense", "sparse", "speed-up")
    _add(
        table,
        "attention at its density",
        plan.attention_pflops,
        evaluated,
        seconds.dense_attention,
        seconds.dense_calls + seconds.sparse_cells,
    )
    _add(table, "grouping, routing, reconstruction", 0.0, plan.overhead_pflops, 0.0, seconds.overhead)
    _add(table, "everything else", plan.rest_pflops, plan.rest_pflops, seconds.rest, seconds.rest)
    if seconds.transfer:
        table.add_row("weights to the GPU", "", "", *(2 * [_time(seconds.transfer)]), "")
    table.add_section()
    attention = f"{plan.attention_speedup:.2f} x"
    table.add_row(
        "attention with its overhead",
        "",
        "",
        _time(seconds.dense_attention),
        _time(seconds.sparse_attention),
        attention,
    )
    table.add_row(
        "total (FLOPs without overhead)",
        f"{plan.dense_pflops:.4g}",
        f"{plan.sparse_pflops:.4g}",
        _time(seconds.dense),
        _time(seconds.sparse),
        f"{plan.speedup:.2f} x",
    )
    if plan.seconds_fast is not None:
        fast = plan.seconds_fast
        table.add_row(
            "total, best dense kernel", "", "", _time(fast.dense), _time(fast.sparse), f"{plan.speedup_fast:.2f} x"
        )
    return table


def _paper(plan: Plan) -> Table:
    paper = plan.paper
    assert paper is not None
    table = _table("beside the paper's Table 1", "", "here", "paper", "deviation")
    for name, key in (("dense PFLOPs", "dense"), ("sparse PFLOPs", "sparse")):
        here, there = getattr(plan, f"{key}_pflops"), paper[f"{key}_pflops"]
        table.add_row(name, f"{here:.2f}", f"{there:.2f}", f"{paper[f'{key}_deviation']:+.1%}")
    if plan.machine.name == "h100":
        speedups = f"{plan.speedup:.2f} x"
        if plan.speedup_fast is not None:
            speedups += f", best dense kernel {plan.speedup_fast:.2f} x"
        table.add_row("speed-up", speedups, f"{paper['speedup']:.2f} x", f"{plan.speedup / paper['speedup'] - 1:+.1%}")
    table.caption = f"what the dense figure needs: {paper['assumption']}"
    table.caption_justify = "left"
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left")
    for number, column in enumerate(columns):
        left = number == 0 or len(columns) == 2
        table.add_column(column, justify="left" if left else "right")
    return table


def _add(table: Table, name: str, dense: float, sparse: float, before: float, after: float) -> None:
    table.add_row(name, f"{dense:.4g}", f"{sparse:.4g}", _time(before), _time(after), "")


def _time(seconds: float) -> str:
    if seconds == 0:
        return "0"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
