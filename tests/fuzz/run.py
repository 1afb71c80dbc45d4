"""Runs random cases for some time and prints what breaks: `python -m tests.fuzz.run --seconds 600`."""

import argparse
import collections
import time

import torch

from tests.fuzz.cases import make
from tests.fuzz.checks import call, check, check_repeats


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--step", type=int, default=1, help="distance of the seeds: for several processes")
    parser.add_argument("--cases", type=int, default=1 << 60)
    parser.add_argument("--large", action="store_true", help="with lengths up to 2,100")
    parser.add_argument("--brief", action="store_true", help="one repetition of each case, not all")
    parser.add_argument("--repeats", action="store_true", help="only whether results repeat")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, broken, seed, kinds = time.perf_counter(), [], options.first, collections.Counter()
    done = 0
    slowest = (0.0, 0)
    while time.perf_counter() - started < options.seconds and done < options.cases:
        begun = time.perf_counter()
        case = make(seed, small=not options.large)
        found = check_repeats(case, call(case)[0]) if options.repeats else check(case, thorough=not options.brief)
        slowest = max(slowest, (time.perf_counter() - begun, seed))
        if found:
            broken.append(seed)
            for line in found:
                kinds[line.split(":", 1)[-1].strip()[:40]] += 1
            print(f"{make(seed, small=not options.large)}\n    " + "\n    ".join(found), flush=True)
        done, seed = done + 1, seed + options.step
    took = time.perf_counter() - started
    print(f"{done} cases in {took:.0f} s, {len(broken)} broken, slowest {slowest[0]:.1f} s (seed {slowest[1]})")
    print("seeds:", *broken)
    for kind, count in kinds.most_common():
        print(f"{count:6} {kind}")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
