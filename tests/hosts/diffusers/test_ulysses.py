"""Two processes with gloo: sparse attention under Ulysses is the sparse attention of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import residua

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="gloo on localhost is tested on Linux"),
]


def measured():
    """What the worker measured on two ranks."""
    worker = Path(__file__).with_name("ulysses_worker.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    folders = Path(residua.__file__).parents[1], Path(__file__).parents[3]
    env["PYTHONPATH"] = os.pathsep.join([*map(str, folders), env.get("PYTHONPATH", "")])
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run([*launch, str(worker)], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def test_ulysses_equals_one_process_and_ring_is_refused():
    """One test: two ranks take seconds to start."""
    results = measured()
    shapes = {
        "wan, parallel first": [1, 2, 192, 12],
        "wan, sparse first": [1, 2, 192, 12],
        "ltx": [2, 1, 192, 16],
        "wan, 3 heads": [1, 2, 192, 12],  # one of them is on the other rank
    }
    for case, shape in shapes.items():
        found = results[case]
        if found is None:  # this diffusers cannot do it
            continue
        assert found["difference"] <= 2e-6
        assert (found["sparse"], found["dense"]) == (8, {"first steps": 4})
        assert [seen["q"] for seen in found["shapes"]] == [shape]  # every token, half of the heads
        assert found["finite_after"]
    for order in ("parallel first", "sparse first"):
        assert "Ring spreads them; use ContextParallelConfig(ulysses_degree=...)" in results[f"ring, {order}"]
