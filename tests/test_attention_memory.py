"""Never N x N, never [N, C] for all heads: long calls in a process of their own, and its peak memory as the
system counts it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("resource")

PRELUDE = """
import resource, sys, torch, residua
from residua import Partition, Route
from residua.api import attend_route
from residua.ops.backend import Backend
from residua.method.grouping.partition import kmeans

BASE = Backend()
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)

def peak():
    if sys.platform == "linux":  # getrusage begins with the peak of the process that started this one
        status = open("/proc/self/status").read()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used * (1 if sys.platform == "darwin" else 1024)

def normal(*shape):
    return torch.randn(*shape, generator=generator)

def even(tokens, groups):
    return Partition.from_labels((torch.arange(tokens) % groups).view(1, 1, tokens), groups)

short = [normal(1, 1, 500, 8) for _ in range(3)]
residua.attention(*short, residua.Config(backend="torch"))
before = peak()
"""
# what each would take at least if it were not cut into pieces
WORK = {
    "a long call": (
        1600,
        "config = residua.Config(density=0.05, kmeans_cold=1, key_rank=4, query_rank=4, backend='torch')\n"
        "q, k, v = (normal(1, 1, 20_000, 8) for _ in range(3))\n"
        "out = residua.attention(q, k, v, config, exact_queries=(0, 5_000))\n",
    ),
    "one group of everything": (
        900,
        "q, k, v = (normal(1, 1, 15_000, 4) for _ in range(3))\n"
        "route = Route(even(15_000, 1), even(15_000, 1), torch.ones(1, 1, 1, 1, dtype=torch.bool))\n"
        "out = attend_route(q, k, v, route, backend='torch')[0]\n",
    ),
    "k-means of many heads": (480, "out = kmeans(normal(16, 5_000, 4), 1_500, 1, backend=Backend()).centres\n"),
    "scores of many anchors": (
        500,
        "out = BASE.cell_mass(normal(1, 1, 2_100, 4), normal(1, 1, 20_000, 4), even(20_000, 9), 0.5)\n",
    ),
}


@pytest.mark.parametrize("name", WORK)
def test_peak_memory_is_bounded(name):
    megabytes, work = WORK[name]
    code = PRELUDE + work + "assert out.isfinite().all()\nprint(peak() - before)\n"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) / 1e6 < megabytes / 2, found.stdout
