"""What each choice that the paper leaves open changes: the table of
docs/decisions/0010-what-the-paper-leaves-open.md, on any folder of recorded calls.

    residua capture --model world --frames 64 --layers 0,1,2,3,4,5 --steps 2 --run-steps 4 --out captures-16k
    python -m dev.benchmarks.open_choices captures-16k

Every setting is changed alone. Printed are mean and p99 of the relative row error, each the mean over the
calls; the probe rows, which are exact, are among the rows.
"""

import argparse
from pathlib import Path
from statistics import fmean

from residua import Config
from residua.tools.capture.captures import read_captures
from residua.tools.metrics.row_error import row_errors
from residua.tools.studies.subject import Subject

FINE = {"query_groups": 300, "kv_groups": 1000}
CHOICES = {
    "`Config.paper()`": Config.paper(),
    '`probe_order="index"`': Config.paper(probe_order="index"),
    '`probe_order="largest"`': Config.paper(probe_order="largest"),
    "300 x 1000 groups": Config.paper(**FINE),
    "300 x 1000 groups, by index": Config.paper(**FINE, probe_order="index"),
    "300 x 1000 groups, largest first": Config.paper(**FINE, probe_order="largest"),
    '`budget_scope="query-group"`': Config.paper(budget_scope="query-group"),
    '`score="value-error"`': Config.paper(score="value-error"),
    '`metric_spacing="golden"`': Config.paper(metric_spacing="golden"),
    "`Config.authors()`": Config.authors(),
    "nothing reconstructed": Config.paper(reconstruction="none"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("captures", type=Path, help="folder of recorded calls")
    parser.add_argument("--density", type=float, default=0.22)
    given = parser.parse_args()
    calls = read_captures(given.captures)
    errors: dict[str, list[tuple[float, float]]] = {name: [] for name in CHOICES}
    for captured in calls:
        subject = Subject(captured, Config())
        for name, config in CHOICES.items():
            out, _ = subject.attend(config.replace(density=given.density))
            errors[name].append(row_errors(out, subject.dense))
    tokens = sorted({captured.tokens for captured in calls})
    print(f"{len(calls)} calls of {', '.join(f'{n:,}' for n in tokens)} tokens, density {given.density:g}\n")
    print("| | mean | p99 |\n|---|---|---|")
    for name, found in errors.items():
        print(f"| {name} | {fmean(mean for mean, _ in found):.4f} | {fmean(p99 for _, p99 in found):.3f} |")


if __name__ == "__main__":
    main()
