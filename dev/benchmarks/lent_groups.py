"""What it costs and saves to start a layer from the groups of another guidance branch, or of another
transformer (docs/decisions/0017-groups-are-lent.md).

    python -m dev.benchmarks.lent_groups --out lent                   # branches of the model in the box
    python -m dev.benchmarks.lent_groups --out lent --second WEIGHTS  # and a second transformer like it

Records the dense calls of four layers in runs of four steps with guidance, 8,192 tokens, one run for each of
the first `--scenes` report scenes (a minute or two each; folders that exist are used again), then makes the
calls sparse at 6 %. Prints the mean over all heads and scenes of the relative row error, its p99 and the CPU
time of a call, and of the heads' errors over their own cold errors the largest.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import residua
from residua import Config, State
from residua.method.grouping import reuse
from residua.tools.capture import capture
from residua.tools.capture.captures import CapturedCall, read_captures
from residua.tools.generate.loading import PipelinePlacement, load
from residua.tools.metrics.row_error import row_errors
from residua.tools.studies.subject import dense_rows
from residua.world.held_out import REPORT_PROMPTS, SEEDS

CONFIG = Config(density=0.06)
Calls = dict[tuple[int | str, int, int | None, str], CapturedCall]
Measured = tuple[float, float, float]  # mean and p99 of the row error, milliseconds
Found = dict[str, list[Measured]]  # by how a call started


def recorded(folder: Path, model: str, scene: int, steps: list[int], guidance: float) -> Calls:
    """The calls of one scene by layer, head, step and branch."""

    def stop(pipe: Any, step: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step >= max(steps)  # what follows is not recorded
        return tensors

    if not folder.exists():
        pipe = load(model, PipelinePlacement("cpu", "fp32", "none"))
        capture(
            pipe,
            folder,
            layers=[0, 2, 4, 5],
            heads=[0, 1],
            steps=steps,
            prompt=REPORT_PROMPTS[scene],
            num_inference_steps=4,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(SEEDS["report"] + scene),
            callback_on_step_end=stop,
        )
    return {(c.layer, c.head, c.step, c.branch): c for c in read_captures(folder)}


def after(call: CapturedCall) -> State:
    """The state of a layer after this call."""
    state = State()
    residua.attention(*call.load(), CONFIG, state)
    return state


def borrowing(lender: State) -> State:
    state = State()
    state.start_from(lender)
    return state


def measure(call: CapturedCall, state: State) -> Measured:
    tensors, dense = call.load(), dense_rows(call.call())[0]
    begin = time.process_time()
    out = residua.attention(*tensors, CONFIG, state)
    seconds = time.process_time() - begin
    return *row_errors(out, dense), 1000 * seconds


def compare(calls: Calls, lenders: Calls, what: tuple[int, str], lent: tuple[int, str], found: Found) -> None:
    """Calls of one step and branch: cold, from lent groups, and (where recorded) from the step before."""
    for layer, head in sorted({key[:2] for key in calls}, key=str):
        call, lender = calls[(layer, head, *what)], after(lenders[(layer, head, *lent)])
        found[f"cold, {CONFIG.kmeans_cold} steps"].append(measure(call, State()))
        for steps in (2, 5, 10):
            reuse.BORROWED_STEPS = steps
            found[f"lent, {steps} steps"].append(measure(call, borrowing(lender)))
        before = calls.get((layer, head, what[0] - 1, what[1]))
        if before is not None:
            found["from the step before"].append(measure(call, after(before)))


def show(found: Found) -> None:
    print("| start | mean error | p99 | worst head / its cold error | ms |\n|---|---|---|---|---|")
    cold = next(iter(found.values()))
    for name, values in found.items():
        mean, p99, ms = map(fmean, zip(*values, strict=True))
        worst = max(value[0] / first[0] for value, first in zip(values, cold, strict=True))
        print(f"| {name} | {mean:.4f} | {p99:.3f} | {worst:.2f} | {ms:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the recorded calls")
    parser.add_argument("--scenes", type=int, default=4, help="how many report scenes")
    parser.add_argument("--second", help="weights of a second transformer")
    given = parser.parse_args()
    torch.set_num_threads(1)
    branches: Found = defaultdict(list)
    transformers: Found = defaultdict(list)
    for scene in range(given.scenes):
        first = recorded(given.out / f"first-{scene}", "world", scene, [0, 1] if given.second else [0], 2.0)
        compare(first, first, (0, "uncond"), (0, "cond"), branches)
        if given.second:
            second = recorded(given.out / f"second-{scene}", given.second, scene, [1, 2], 1.0)
            compare(second, first, (2, "cond"), (1, "cond"), transformers)
    print("uncond from cond, first step\n")
    show(branches)
    if given.second:
        print("\nsecond transformer from the first, third step\n")
        show(transformers)


if __name__ == "__main__":
    main()
