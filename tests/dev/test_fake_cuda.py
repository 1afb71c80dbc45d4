"""Whole warm calls on CUDA tensors without memory: no host read, no mixed devices, and within their budgets.

Such a tensor has a device and no values, so whatever reads one on the host fails; launches are recorded.
"""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dev.gpu_model.fake_cuda import fake_cuda
from dev.gpu_model.model import Task, tiles_of
from dev.gpu_model.trace import Trace, trace_call
from dev.gpu_model.work import work_of
from residua.config import Config
from residua.method.budget.shared import CUTS

pytestmark = pytest.mark.slow

FRESH = Config(regroup_every=1)  # a warm call that clusters its tokens
WAN = {"tokens": 75600, "heads": 40, "head_dim": 128}
TEXT = {"kv_heads": 2, "text": 512}
# sums that CUDA makes in any order; of whole numbers they would be the same in every one
UNORDERED = {"index_add", "index_add_", "scatter_add", "scatter_add_", "index_put_", "put_"}


def assert_stays_on_the_device(trace: Trace) -> None:
    assert trace.waits == []
    assert trace.mixed == []
    assert {launch.name for launch in trace.launches} >= {"assign", "project", "attend", "key_tiles"}


def moved(trace: Trace, density: float) -> float:
    """Bytes, at the route of a synthetic call."""
    tiles = tiles_of(trace, Task(density=density))
    by_kernels = sum(work_of(launch, tiles).bytes for launch in trace.launches)
    return by_kernels + sum(op.bytes for op in trace.operations)


@pytest.fixture(scope="module")
def default() -> Trace:
    return trace_call(FRESH, **WAN)


def test_the_default_call_is_a_few_hundred_launches(default):
    assert_stays_on_the_device(default)
    assert default.kernels <= 250
    assert default.peak_bytes <= 4 << 30


def test_the_default_call_moves_its_tensors_a_few_times(default):
    """q, k and v are 2.3 GB."""
    assert moved(default, 0.22) <= 23.5e9
    assert sum(op.bytes for op in default.operations) <= 3e9  # by torch; the rest by our kernels


def test_a_sparser_call_has_finer_groups_and_still_fits():
    trace = trace_call(Config(density=0.05, regroup_every=1), **WAN)
    assert_stays_on_the_device(trace)
    assert trace.kernels <= 250
    assert trace.peak_bytes <= 5 << 30
    assert moved(trace, 0.05) <= 25e9


def test_keys_and_values_are_sorted_once(default):
    """By the kernels that read them first: no launch of its own copies a whole tensor."""
    assert not [x for x in default.launches if x.name == "permute" and x.arguments["OUT"].sizes[2] == 75600]
    kept = [x for x in default.launches if x.arguments.get("SORTED") is not None]
    assert [x.name for x in kept] == ["segment_mean", "key_covariance"]


def test_whether_a_summary_would_serve_is_asked_before_it_is_made(default):
    """From second moments that the summary needs anyway: they are computed once."""
    assert [x.stage for x in default.launches if x.name == "moment"] == ["grouping"] * 2 + ["routing"] * 2


def test_values_are_not_read_for_nan_alone(default):
    assert "broken" not in {launch.name for launch in default.launches}


def test_what_was_many_launches_is_one(default):
    names = [launch.name for launch in default.launches]
    assert {name: names.count(name) for name in ("rows", "merge", "slots", "mass", "key_covariance")} == {
        "rows": 1,
        "merge": 1,
        "slots": 1,
        "mass": 1,
        "key_covariance": 1,
    }


def test_probe_rows_are_too_few_for_tall_tiles(default):
    tiles = [(x.stage, x.arguments["LOW"]) for x in default.launches if x.name == "attend"]
    assert tiles == [("probes", True), ("attention", False), ("attention", True)]


def test_drift_is_found_by_the_attention_kernel_where_it_has_the_registers(default):
    assert "drift" not in {launch.name for launch in default.launches}
    ada = trace_call(FRESH, tokens=8192, heads=2, head_dim=128, arch=89)
    assert [x.name for x in ada.launches].count("drift") == 1


def test_next_to_nothing_is_computed_in_fp64(default):
    """A consumer GPU has a 64th of its rate for it."""
    assert sum(op.flops for op in default.operations if op.dtype == "float64") <= 0.5e9


def test_cells_are_put_into_buckets_once_and_never_sorted(default):
    """torch would sort the cells of all heads together, and then by head: ten passes over them."""
    assert not [op.name for op in default.operations if op.name in ("sort", "argsort", "topk")]
    routing = [x.name for x in default.launches if x.stage == "routing"]
    assert [routing.count(name) for name in ("priority", "count", "starts", "place", "fill")] == [1] * 5


def test_a_short_call_launches_no_more_than_a_long_one(default):
    short = trace_call(FRESH, tokens=8192, heads=24, head_dim=128)
    assert_stays_on_the_device(short)
    assert short.kernels <= default.kernels <= 250


def test_a_call_that_keeps_its_groups_clusters_nothing(default):
    """As seven of eight warm calls do."""
    short = trace_call(Config(), tokens=8192, heads=24, head_dim=128)
    assert short.waits == short.mixed == []
    assert not {"assign", "project"} & {launch.name for launch in short.launches}
    assert short.kernels <= 210 < default.kernels


@pytest.mark.parametrize("shape", [{}, TEXT], ids=["plain", "grouped queries, text, padding"])
@pytest.mark.parametrize("balance", [True, False])
def test_budgets_that_move_are_learned_and_spent_on_the_device(balance, shape):
    """As in `accelerate` by default: the second call spends what the first one learned."""
    config = Config(density=0.06, max_error=0.2, balance=balance)
    trace = trace_call(config, tokens=8192, heads=4, head_dim=128, **shape)
    assert trace.waits == [] and trace.mixed == []
    solved = sum(op.name == "exp" and op.dtype == "float64" for op in trace.operations) >= CUTS
    assert solved == balance
    assert trace.kernels <= 560


@pytest.mark.parametrize("shape", [{}, TEXT], ids=["plain", "grouped queries, text, padding"])
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128])
@pytest.mark.parametrize("reconstruction", ["anchored", "tail", "probe", "none"])
def test_every_reconstruction(reconstruction, dim, shape):
    config = Config(reconstruction=reconstruction, regroup_every=1)
    trace = trace_call(config, tokens=16384, heads=8, head_dim=dim, **shape)
    assert_stays_on_the_device(trace)
    assert trace.kernels <= 600
    assert not [op for op in trace.operations if op.name in UNORDERED and "float" in op.dtype]
    assert sum(op.bytes for op in trace.operations) <= 6e9


@pytest.mark.parametrize("arch", [80, 86, 89, 100, 120])
def test_other_architectures(arch):
    trace = trace_call(FRESH, tokens=8192, heads=24, head_dim=128, arch=arch)
    assert_stays_on_the_device(trace)
    assert trace.kernels <= 250
    assert tiles_of(trace, Task(8192, 24)).utilisation >= 0.7


IMAGINED = """
from dev.gpu_model.trace import trace_call
from residua.config import Config
trace_call(Config(), tokens=2048, heads=2, head_dim=128, arch=90)
from dev.gate.compile import compile_only
from residua.ops.triton import attend_tiles, rows, small_kmeans
with compile_only(89):
    print({module.architecture() for module in (attend_tiles, rows, small_kmeans)})
"""


def test_an_imagined_gpu_is_forgotten():
    """Kernels that are first imported while a call is traced for one GPU still ask for which one they are
    compiled. In a process of its own, where nothing has been imported yet."""
    shown = subprocess.run([sys.executable, "-c", IMAGINED], capture_output=True, text=True, check=False)
    assert shown.stdout.strip() == "{89}", shown.stderr


def test_a_read_of_a_value_would_be_noticed():
    with fake_cuda(), pytest.raises(Exception, match=r"data-dependent|_local_scalar_dense|item"):
        torch.ones(3, device="cuda").sum().item()
