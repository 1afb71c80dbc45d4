"""How much of two cores Ray leaves for the work: 24 rows with `residua evaluate` against a plain loop over
them.

    python -m dev.benchmarks.evaluate_efficiency                 # some minutes; on a quiet machine
    python -m dev.benchmarks.evaluate_efficiency --out eff.json  # also as JSON

Both make the same rows with the same code, each in a process of its own: the plain loop with all cores for
one row at a time, Ray with one worker per core. `whole` counts everything from the start of the process to
its report; `rows` begins with the first row and leaves out the start of Ray, which a long run pays once.
`same_hashes` may be false: torch may round differently with another number of threads.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPTS, SETTINGS = 8, 3  # 24 rows
SUITE = """
model = "world"
[prompts]
texts = {texts}
[generation]
steps = {steps}
[settings.paper]
method = "paper"
density = 0.22
[settings.anchored]
method = "anchored"
density = 0.22
[metrics]
floor = false
"""


def run(suite: Path, out: Path, *more: str) -> dict[str, float]:
    """Seconds of one run in a process of its own: in all, of the rows, and before and after them."""
    began = time.time()
    command = [sys.executable, "-m", "residua", "evaluate", str(suite), "--out", str(out), *more]
    subprocess.run(command, check=True)
    ended = time.time()
    rows = sorted(path.stat().st_mtime for path in (out / "rows").glob("*.parquet"))
    # A log begins with its row; the report is written after the last row.
    first = min(_began(path) for path in (out / "logs").glob("*.log") if path.stem != "ray")
    return {"whole": ended - began, "rows": rows[-1] - first, "before": first - began, "after": ended - rows[-1]}


def _began(log: Path) -> float:
    """When a row began: the first line of its log."""
    stamp = " ".join(log.read_text(encoding="utf-8").split()[:2])
    return time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S"))


def hashes(out: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((out / "manifest.json").read_text())["hashes"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from residua.tools.generate.comparison import machine
    from residua.world.held_out import TUNING_PROMPTS

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        suite = folder / "suite.toml"
        suite.write_text(SUITE.format(texts=json.dumps(TUNING_PROMPTS[:PROMPTS]), steps=given.steps))
        loop = run(suite, folder / "loop", "--ray", "off")
        ray = run(suite, folder / "ray")
        same = hashes(folder / "loop") == hashes(folder / "ray")
        count = len(hashes(folder / "ray"))
    found = {
        "rows": count,
        "same_hashes": same,
        "plain_loop": loop,
        "ray": ray,
        "machine": machine(),
        "efficiency": {name: loop[name] / ray[name] for name in ("whole", "rows")},
    }
    print(json.dumps(found, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if count != PROMPTS * SETTINGS:
        raise SystemExit(f"{count} rows: this is no measurement of {PROMPTS * SETTINGS}")


if __name__ == "__main__":
    main()
