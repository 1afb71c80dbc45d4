"""A plan for a terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from ..reports.table import Table, byte_count, seconds
from .plan import Plan


def render(plan: Plan) -> RenderableType:
    """Everything that `Plan.to_dict` says, as tables."""
    style = "bold green" if plan.worth_it else "bold yellow"
    tables = [_request(plan), _costs(plan)] + ([] if plan.paper is None else [_paper(plan)])
    parts: list[RenderableType] = [table.rich() for table in tables]
    parts.append(Text(plan.verdict, style=style))
    if plan.memory.fits is False:
        parts.append(Text(plan.memory.verdict, style="bold yellow"))
    parts += [Text(f"note: {note}") for note in plan.notes]
    parts += [Text("assumptions", style="bold"), *(Text(f"- {line}", style="dim") for line in plan.assumptions)]
    return Group(*parts)


def _request(plan: Plan) -> Table:
    width, height = plan.size
    schedule, model, memory = plan.schedule, plan.model, plan.memory
    summarises = plan.config.summarises
    first = f" ({schedule.first_dense})" if schedule.first_dense else ""
    rows = {
        "planned": plan.method,
        "tokens": f"{plan.tokens:,} ({' x '.join(map(str, plan.grid))}), and {model.text_tokens} of text",
        "attention": f"{model.layers} layers x {model.heads} heads ({model.kv_heads} K/V) x {model.head_dim}",
        "groups per head": f"{plan.call.query_groups} of queries, {plan.call.kv_groups} of keys",
        "cost of a sparse call" if summarises else "density of a sparse call": (
            f"{plan.call.density:.3f} of dense attention, {plan.call.probes} probe rows per head in it"
        ),
        "attention calls": f"{schedule.sparse_calls:,} sparse, {schedule.dense_calls:,} dense{first}",
        f"attention in all, of {'dense' if summarises else 'all pairs'}": f"{plan.evaluated:.3f}",
        "memory of the method": (f"{byte_count(memory.call)} during a call, {byte_count(memory.state)} kept"),
        f"GPU memory, offload {memory.offload}": (
            f"{byte_count(memory.weights)} weights, {byte_count(memory.activations)} activations; {memory.verdict}"
        ),
    }
    title = f"{model.name}: {width}x{height}, {plan.frames} frames, {plan.steps} steps, {plan.machine.label}"
    return Table(title, ("what", "how much"), tuple(rows.items()))


def _costs(plan: Plan) -> Table:
    took, rest = plan.seconds, f"{plan.rest_pflops:.4g}"
    evaluated = f"{plan.evaluated * plan.attention_pflops:.4g}"
    calls = took.dense_calls + took.sparse_cells
    rows = [
        ("attention at its density", f"{plan.attention_pflops:.4g}", evaluated, took.dense_attention, calls, ""),
        ("grouping, routing, reconstruction", "0", f"{plan.overhead_pflops:.4g}", 0.0, took.overhead, ""),
        ("everything else", rest, rest, took.rest, took.rest, ""),
    ]
    if took.transfer:
        rows.append(("weights to the GPU", "", "", took.transfer, took.transfer, ""))
    gain, flops = f"{plan.attention_speedup:.2f} x", (f"{plan.dense_pflops:.4g}", f"{plan.sparse_pflops:.4g}")
    rows += [
        ("attention with its overhead", "", "", took.dense_attention, took.sparse_attention, gain),
        ("total (FLOPs without overhead)", *flops, took.dense, took.sparse, f"{plan.speedup:.2f} x"),
    ]
    if plan.seconds_fast is not None:
        fast = plan.seconds_fast
        rows.append(("total, best dense kernel", "", "", fast.dense, fast.sparse, f"{plan.speedup_fast:.2f} x"))
    columns = ("part", "PFLOPs dense", "PFLOPs sparse", "dense", "sparse", "speed-up")
    cells = tuple((*flops, seconds(dense), seconds(sparse), gain) for *flops, dense, sparse, gain in rows)
    return Table("cost of the video", columns, cells)


def _paper(plan: Plan) -> Table:
    paper = plan.paper
    assert paper is not None
    rows = []
    for name in ("dense", "sparse"):
        here, there = getattr(plan, f"{name}_pflops"), paper[f"{name}_pflops"]
        rows.append((f"{name} PFLOPs", f"{here:.2f}", f"{there:.2f}", f"{paper[f'{name}_deviation']:+.1%}"))
    if plan.machine.name == "h100":
        gains = f"{plan.speedup:.2f} x"
        if plan.speedup_fast is not None:
            gains += f", best dense kernel {plan.speedup_fast:.2f} x"
        rows.append(("speed-up", gains, f"{paper['speedup']:.2f} x", f"{plan.speedup / paper['speedup'] - 1:+.1%}"))
    note = f"what the dense figure needs: {paper['assumption']}"
    return Table("beside the paper's Table 1", ("", "here", "paper", "deviation"), tuple(rows), note)
