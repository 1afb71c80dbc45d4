"""Is one checkout slower than another? Both run in turns, so that what else the machine does hurts them alike.

    python -m dev.compare_speed ../before . --tokens 4096,8192,16384 --density 0.1

Every checkout gets a worker process of its own (its `src` must hold a built native library). A round times one run in
each worker, a cold call and some warm ones, in an order that changes from round to round; the ratio is new to old.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIMIT = 1.03  # a median ratio above this counts as slower


def tensors(tokens: int, heads: int, dim: int) -> list[Tensor]:
    """q, k and v around a few centres, [1, H, N, D] each."""
    g = torch.Generator().manual_seed(tokens)
    centres = torch.randn(max(8, tokens // 256), dim, generator=g)
    place = torch.randint(0, len(centres), (tokens,), generator=g)
    return [centres[place] + 0.6 * torch.randn(1, heads, tokens, dim, generator=g) for _ in range(3)]


def serve() -> None:
    """The worker: reads a task per line, answers with the seconds of one run."""
    import residua

    given: dict[tuple[int, ...], list[Tensor]] = {}
    for line in sys.stdin:
        task = json.loads(line)
        torch.set_num_threads(task["threads"])
        key = task["tokens"], task["heads"], task["dim"]
        q, k, v = given.setdefault(key, tensors(*key))
        config, state = residua.Config(density=task["density"]), residua.State()
        start = time.perf_counter()
        for _ in range(1 + task["warm"]):
            residua.attention(q, k, v, config, state)
        print(time.perf_counter() - start, flush=True)


class Worker:
    """A process on one checkout."""

    def __init__(self, checkout: Path) -> None:
        folder = (checkout / "src").resolve()
        if not (folder / "residua").is_dir():
            raise SystemExit(f"{checkout}: wanted a checkout with src/residua")
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def seconds(self, task: dict[str, Any]) -> float:
        """The time of one run."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def measure(old: Worker, new: Worker, task: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Medians of both, and of their ratio, with the middle half of the ratios as its spread."""
    old.seconds(task), new.seconds(task)  # loads libraries, makes inputs
    times: dict[Worker, list[float]] = {old: [], new: []}
    for number in range(rounds):
        for worker in (old, new) if number % 2 else (new, old):
            times[worker].append(worker.seconds(task))
    ratios = sorted(b / a for a, b in zip(times[old], times[new], strict=True))
    low, high = (ratios[math.floor(share * (rounds - 1))] for share in (0.25, 0.75))
    seconds = {"old": statistics.median(times[old]), "new": statistics.median(times[new])}
    return {"tokens": task["tokens"], **seconds, "ratio": statistics.median(ratios), "spread": [low, high]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tokens", default="4096,8192,16384", help="lengths, with commas")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--warm", type=int, default=3, help="warm calls after the cold one of each run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    task = {name: getattr(asked, name) for name in ("density", "heads", "dim", "warm", "threads")}
    workers = Worker(asked.old), Worker(asked.new)
    lengths = [int(tokens) for tokens in asked.tokens.split(",")]
    try:
        rows = [measure(*workers, {**task, "tokens": tokens}, asked.rounds) for tokens in lengths]
    finally:
        for worker in workers:
            worker.close()
    slower = [row["tokens"] for row in rows if row["ratio"] > LIMIT]
    print(json.dumps({"settings": task, "rows": rows, "slower": slower}, indent=2))
    return 1 if slower else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        raise SystemExit(main())
