"""Gives rows to workers: on Ray Data, or one after the other in this process."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ...errors import InputError, ResiduaError
from ..generate.loading import WORLD
from .generate import Generate
from .measure import Measure
from .records import Job, Record
from .rows import Row, in_working_order
from .store import open_to_append

LOCAL, OFF = "local", "off"
MAX_STORE_BYTES = 2 << 30  # object store on this machine, for clips that wait to be measured
MIN_STORE_BYTES = 80 << 20  # Ray refuses to start with less
# Set before Ray is imported, unless the user has set them: no usage data is sent, devices stay visible as
# they are, and workers keep normal priority, because their seconds are measured.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}


class StoppedError(ResiduaError, RuntimeError):
    """A run could not go on; finished rows are kept."""


class Engine(Protocol):
    """Makes rows, in any order, and yields a summary of each; rows whose worker died are left out."""

    def stream(self, job: Job, rows: Sequence[Row]) -> Iterator[Record]: ...


class PlainLoop:
    """One row after the other, for debugging and as the baseline for Ray's overhead."""

    def stream(self, job: Job, rows: Sequence[Row]) -> Iterator[Record]:
        make = Generate(replace(job, threads=job.suite.work.threads))
        measure = Measure(job, threads=None)
        for row in in_working_order(rows, 0):
            yield measure(make({"row": row.to_json()}))


@dataclass(frozen=True)
class Pool:
    """How many workers there are, and what each takes of the cluster."""

    workers: int
    measuring: int
    gpus: float
    cpus: float
    threads: int | None


class RayEngine:
    """Ray Data: a pool of actors that hold the pipeline, and a pool that measures.

    Actors of a round in which some died may stay alive and hold the GPUs that the next round needs: Ray is
    only sure to end them when the connection closes. A connection that we did not open stays open.
    """

    def __init__(self, connect: Callable[[], None] | None = None) -> None:
        """Args:
        connect: Connects to Ray; None if the caller has connected and keeps the connection.
        """
        self._connect = connect
        self._rounds = 0

    def _begin_round(self, ray: Any) -> None:
        self._rounds += 1
        if self._rounds > 1 and self._connect is not None:
            ray.shutdown()
            self._connect()

    def stream(self, job: Job, rows: Sequence[Row]) -> Iterator[Record]:
        import ray
        from ray.data import ActorPoolStrategy, DataContext

        make: Any = Generate
        measure: Any = Measure
        self._begin_round(ray)
        pool = plan_pool(job, ray.cluster_resources(), machines(ray.nodes()), len(rows))
        told = (replace(job, threads=pool.threads),)
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.max_errored_blocks = -1  # a row whose worker died is made in the next round
        items = [{"row": row.to_json()} for row in in_working_order(rows, pool.workers)]
        # Unlimited restarts, no retries: a task that is retried for a lost node would wait forever.
        # `Generate` counts the attempts of a row itself.
        faults: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about the form in which `faults` are given
            warnings.filterwarnings("ignore", message=".*ray_remote_args.*")
            made = ray.data.from_items(items, override_num_blocks=len(items)).map(
                make,
                fn_constructor_args=told,
                num_cpus=pool.cpus,
                num_gpus=pool.gpus,
                compute=ActorPoolStrategy(size=pool.workers, max_tasks_in_flight_per_actor=1),
                **faults,
            )
            measured = made.map(
                measure,
                fn_constructor_args=told,
                num_cpus=0,
                **faults,
                compute=ActorPoolStrategy(size=pool.measuring, max_tasks_in_flight_per_actor=2),
            )
        try:
            for batch in measured.iter_batches(batch_size=None, prefetch_batches=0):
                for place in range(len(batch["id"])):
                    yield {name: column[place] for name, column in batch.items()}
        except ray.exceptions.RayError as error:
            raise StoppedError(f"Ray stopped ({_first_line(error)}); run the same command again to continue") from error


def plan_pool(job: Job, resources: dict[str, float], nodes: int, rows: int) -> Pool:
    """One worker per GPU. Without GPUs one per core for the model in the box, which is small, and one per
    machine for other models.

    Args:
        job: What is run.
        resources: Those of the whole cluster, as Ray reports them.
        nodes: Number of machines in it that can work.
        rows: How many rows are to be made.
    """
    work = job.suite.work
    gpus, cores = int(resources.get("GPU", 0)), max(1, int(resources.get("CPU", 1)))
    if gpus and work.device != "cpu":
        workers = min(work.workers or gpus, rows)
        return Pool(workers, _measuring(workers), 1.0, 1.0, None)
    wanted = work.workers or (cores if job.suite.model == WORLD else max(1, nodes))
    workers = min(wanted, rows, cores)
    return Pool(workers, _measuring(workers), 0.0, 1.0, work.threads or max(1, cores // wanted))


def machines(nodes: Sequence[dict[str, Any]]) -> int:
    """How many of Ray's nodes can work: it also lists lost ones, and a head that has no CPUs on purpose."""
    return sum(bool(node["Alive"]) and node["Resources"].get("CPU", 0) >= 1 for node in nodes)


def _measuring(workers: int) -> int:
    """Few workers are enough: measuring takes a small part of the time of generating."""
    return max(1, workers // 8)


@contextmanager
def started(address: str | None, log: Path) -> Iterator[Engine]:
    """An engine: `off` for the plain loop, None for Ray on this machine, else the address of a cluster.

    Args:
        address: What the user gave.
        log: File for what Ray prints.
    """
    if address == OFF:
        yield PlainLoop()
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _kept_quiet(log):
        import ray

        ours = not ray.is_initialized()
        if ours:
            _initialise(ray, address)
        connect = partial(_initialise, ray, address) if ours else None
        try:
            yield RayEngine(connect)
        finally:
            if ours:
                ray.shutdown()


@contextmanager
def _kept_quiet(log: Path) -> Iterator[None]:
    """Sends what Ray prints, from Python and from C++, to a file: a lost worker is one failed row, not pages
    of text."""
    with open_to_append(log) as words, redirect_stdout(words):
        sys.stderr.flush()
        screen = os.dup(2)
        os.dup2(words.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)


def _initialise(ray: Any, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    own = {"address": "local", "include_dashboard": False, "object_store_memory": _store_bytes()}
    try:
        ray.init(**(own if address is None else {"address": address}), **quiet)
    # Ray passes on whatever errors its transport raises.
    except Exception as error:
        if address is None:
            raise StoppedError(
                f"Ray does not start on this machine ({_first_line(error)}): it may be busy or short of "
                "memory. Run the same command again, or without Ray: --ray off"
            ) from error
        raise InputError(
            f"--ray {address}: no cluster answers ({_first_line(error)}); start one with `ray start --head`, "
            "give its address, or leave --ray out to run on this machine"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def _store_bytes() -> int:
    """At most a tenth of the memory, which is enough for a few clips, and no more than /dev/shm has."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [memory // 10, MAX_STORE_BYTES]
    if os.path.isdir("/dev/shm"):
        space = os.statvfs("/dev/shm")
        limits.append(space.f_bavail * space.f_frsize // 2)
    return max(MIN_STORE_BYTES, min(limits))
