"""On two local Ray nodes: the same rows as a plain loop, whatever is killed on the way."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from residua.errors import InputError
from residua.tools.evaluate import engine
from residua.tools.evaluate.engine import PlainLoop, StoppedError, machines, plan_pool
from residua.tools.evaluate.records import Job
from residua.tools.evaluate.run import Evaluation, Options, evaluate
from residua.tools.evaluate.store import Store
from residua.tools.evaluate.suite import Generation, Suite, Workers
from residua.world.held_out import TUNING_PROMPTS

STORE = 80 << 20
POISON = "a purple elephant"
PATIENCE = 900  # seconds; only a test that hangs gets there
SLOWER = Generation(steps=6, height=32, width=32, frames=16)  # so that something can be killed on the way


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE})
    made.add_node(num_cpus=1, object_store_memory=STORE)
    yield made
    made.shutdown()


def hashes(out: Path) -> dict[str, str]:
    return json.loads((out / "manifest.json").read_text())["hashes"]


def means(out: Path) -> dict[str, float]:
    found = json.loads((out / "report" / "report.json").read_text())["data"]["estimates"]
    return {name: metrics["psnr"]["mean"] for name, metrics in found.items() if "psnr" in metrics}


def in_a_plain_loop(suite: Suite, out: Path) -> Path:
    evaluate(suite, out, engine=PlainLoop())
    return out


def on_the_cluster(cluster: Cluster, suite: Suite, out: Path) -> Evaluation:
    return evaluate(suite, out, Options(cluster.address))


def wait_for(condition, seconds: float = PATIENCE):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.01)
    return found


def marks(out: Path) -> list[dict]:
    """Of rows that are being made at this moment."""
    found = []
    for path in (out / "running").glob("*"):
        try:
            found.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return [mark for mark in found if mark["phase"] == "making"]


@contextmanager
def held(pid: int) -> Iterator[None]:
    """The process stands still in this block; it may be killed there."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_killed_driver_and_a_killed_worker_cost_only_what_they_were_making(cluster, make_suite, tmp_path):
    suite = make_suite([*TUNING_PROMPTS[:2], POISON], generation=SLOWER)
    out = tmp_path / "out"
    driver = start_driver(suite, out, cluster.address)
    try:
        wait_for(lambda: list((out / "rows").glob("*.parquet")) or driver.poll() is not None)
        assert driver.returncode is None
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    kept = {row["id"]: row["run"] for row in Store(out).read_rows()}

    killed: list[int] = []

    def kill() -> None:
        mark = wait_for(lambda: [m for m in marks(out) if m["run"] not in kept.values()])[0]
        killed.append(mark["pid"])
        os.kill(mark["pid"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    found = on_the_cluster(cluster, suite, out)
    thread.join()
    assert killed and found.rows == 9 and found.done == 6 and found.failed == 3 and found.missing == 0
    rows = {row["id"]: row for row in Store(out).read_rows()}
    assert kept and all(rows[name]["run"] == run for name, run in kept.items())  # nothing was made twice
    plain = in_a_plain_loop(suite, tmp_path / "plain")
    assert hashes(out) == hashes(plain)
    alone, sharded = means(plain), means(out)
    assert set(alone) == set(sharded) == {"anchored", "paper"}
    assert all(abs(alone[name] - sharded[name]) <= 1e-9 for name in alone)


def start_driver(suite: Suite, out: Path, address: str) -> subprocess.Popen:
    """`evaluate` in a process of its own, connected to the same cluster."""
    code = (
        "import pickle, sys; from residua.tools.evaluate.run import Options, evaluate\n"
        "suite, out, address = pickle.load(sys.stdin.buffer)\n"
        "evaluate(suite, out, Options(address))\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    driver.stdin.write(pickle.dumps((suite, out, address)))
    driver.stdin.close()
    return driver


@pytest.mark.slow
def test_a_lost_node_costs_only_what_it_was_making(cluster, make_suite, tmp_path):
    suite, out = make_suite(3, generation=SLOWER), tmp_path / "out"
    lost = next(node for node in cluster.list_all_nodes() if not node.head)

    def remove() -> None:
        first = wait_for(lambda: marks(out))[0]["pid"]
        with held(first):  # the other may start so late that this one would have made everything
            wait_for(lambda: [mark for mark in marks(out) if mark["pid"] != first])
            cluster.remove_node(lost, allow_graceful=False)

    thread = threading.Thread(target=remove)
    thread.start()
    found = on_the_cluster(cluster, suite, out)
    thread.join()
    assert len(cluster.list_all_nodes()) == 1
    assert found.done == found.rows == 9
    assert hashes(out) == hashes(in_a_plain_loop(suite, tmp_path / "plain"))


@pytest.mark.parametrize(
    "resources, work, workers, gpus, threads",
    [
        ({"CPU": 64.0, "GPU": 8.0}, Workers(), 8, 1.0, None),
        ({"CPU": 64.0, "GPU": 8.0}, Workers(workers=3), 3, 1.0, None),
        ({"CPU": 64.0, "GPU": 8.0}, Workers(device="cpu"), 2, 0.0, 32),
        ({"CPU": 8.0}, Workers(workers=4), 4, 0.0, 2),
        ({"CPU": 8.0}, Workers(threads=3), 2, 0.0, 3),
    ],
)
def test_workers_by_what_a_cluster_has(make_suite, resources, work, workers, gpus, threads):
    job = Job(make_suite(2, work=work), Path("out"), "run")
    pool = plan_pool(job, resources, nodes=2, rows=100)
    assert (pool.workers, pool.gpus, pool.threads) == (workers, gpus, threads)
    assert plan_pool(job, resources, nodes=2, rows=1).workers == 1


def test_the_small_model_in_the_box_gets_a_worker_per_core(make_suite):
    job = Job(make_suite(2, model="world", work=Workers()), Path("out"), "run")
    pool = plan_pool(job, {"CPU": 8.0}, nodes=1, rows=100)
    assert (pool.workers, pool.threads, pool.measuring) == (8, 1, 1)


def test_lost_machines_and_a_head_without_cores_do_not_count():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 32.0}},
        {"Alive": True, "Resources": {"memory": 1e9}},
        {"Alive": False, "Resources": {"CPU": 32.0}},
        {"Alive": False, "Resources": {}},
    ]
    assert machines(nodes) == 1


class BusyMachine:
    """A Ray that cannot start."""

    @staticmethod
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nAnd so on.")  # what Ray raises


@pytest.mark.parametrize(
    "address, kind, words",
    [
        (None, StoppedError, r"timed out during startup\.\): .* --ray off"),
        ("auto", InputError, "--ray auto: no cluster answers"),
    ],
)
def test_a_ray_that_does_not_start_is_one_line_with_a_way_out(address, kind, words):
    with pytest.raises(kind, match=words):
        engine._initialise(BusyMachine, address)
