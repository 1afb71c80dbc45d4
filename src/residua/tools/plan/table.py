"""Tokens at usual sizes and the expected gain for every named model: `python -m residua.tools.plan.table`."""

from .models import MODELS
from .plan import Plan
from .request import make_plan

GPUS = ("h100", "4090")
NOT_A_RELEASE = ("world",)  # the model in the box


def table() -> str:
    """The plans as a table in Markdown: `quality="balanced"`, sizes and steps of the releases."""
    head = ["model", "size", "frames", "steps", "video tokens", "attention, of dense time"]
    columns = [*head, *(f"attention, {gpu}" for gpu in GPUS), *(f"all, {gpu}" for gpu in GPUS)]
    lines = [_row(columns), _row(["---", "---"] + ["---:"] * (len(columns) - 2))]
    return "\n".join(lines + [_line(name) for name in MODELS if name not in NOT_A_RELEASE])


def _line(name: str) -> str:
    plans = [make_plan(name, gpu=gpu) for gpu in GPUS]
    plan = plans[0]
    share = plan.seconds.dense_attention / plan.seconds.dense
    known = [f"`{name}`", "{}x{}".format(*plan.size), str(plan.frames), str(plan.steps), f"{plan.tokens:,}"]
    gains = [f"{one.attention_speedup:.1f}x" if one.schedule.sparse_calls else "dense" for one in plans]
    return _row([*known, f"{share:.0%}", *gains, *(_whole(one) for one in plans)])


def _whole(plan: Plan) -> str:
    """The gain of the whole generation; bold if it is worthwhile."""
    gain = f"{plan.speedup:.2f}x"
    return f"**{gain}**" if plan.worth_it else gain


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(table())
