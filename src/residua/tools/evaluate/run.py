"""A whole run: makes what is missing, in rounds until nothing is missing, then writes the report."""

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import doctor
from ..generate.comparison import machine
from ..generate.loading import WORLD
from ..output import publish_folder
from .engine import Engine, StoppedError, started
from .manifest import check_manifest, read_manifest, write_manifest
from .records import STOP, Job, Record
from .rows import Row, make_rows, missing_rows
from .store import DONE, FAILED, Store
from .suite import Suite

REPORT = "report"


@dataclass(frozen=True)
class Options:
    """What the command line adds to a suite."""

    address: str | None = None  # of a Ray cluster; None: this machine; "off": no Ray
    extend: bool = False
    retry_failed: bool = False
    command: str = "residua evaluate"


@dataclass(frozen=True)
class Evaluation:
    """How a run ended."""

    rows: int
    done: int
    failed: int
    made: int  # in this run
    report: Path

    @property
    def missing(self) -> int:
        return self.rows - self.done - self.failed


class Watcher:
    """Is told what happens; the command line shows it. This base class shows nothing."""

    def begin(self, rows: Sequence[Row], finished: Sequence[dict[str, Any]], store: Store) -> None:
        """Called with all rows and those that are done before anything runs."""

    def told(self, summary: Record) -> None:
        """Called after each row."""


def evaluate(
    suite: Suite,
    out: Path,
    options: Options | None = None,
    watcher: Watcher | None = None,
    engine: Engine | None = None,
) -> Evaluation:
    """Makes the missing rows of a suite and writes the report.

    Args:
        suite: What to evaluate.
        out: The folder; rows that are in it already are not made again.
        options: Where to run, and what to do with an older folder.
        watcher: Is told what happens.
        engine: Used instead of the one that `options.address` names.

    Returns:
        How many rows there are, are done, and failed.

    Raises:
        StoppedError: If the disk is full or the model cannot be loaded; the same command goes on later.
    """
    store, watcher, options = Store(out), watcher or Watcher(), options or Options()
    suite = _absolute(suite)
    store.prepare()
    with store.locked():
        manifest = check_manifest(read_manifest(out), suite, options.extend, out)
        rows = make_rows(suite, manifest["model_hash"])
        for setting in suite.settings:
            store.prepare_videos(setting.name)
        run = uuid.uuid4().hex[:8]
        manifest["runs"].append(_about_run(run))
        write_manifest(out, manifest)
        store.clear_unfinished()
        if options.retry_failed:
            store.drop_failed()
        before = store.finished(rows)
        finished = {row["id"] for row in before}
        todo = missing_rows(rows, finished, store.references())
        watcher.begin(rows, before, store)
        if todo:
            job = Job(suite, out.resolve(), run)
            try:
                if engine is not None:
                    _rounds(engine, job, rows, finished, watcher)
                else:
                    with started(options.address, out / "logs" / "ray.log") as own:
                        _rounds(own, job, rows, finished, watcher)
            finally:  # workers that were ended with Ray clear up nothing
                store.clear_unfinished()
        return _finish(store, suite, rows, manifest, options.command, len(todo))


def _rounds(engine: Engine, job: Job, rows: Sequence[Row], finished: set[str], watcher: Watcher) -> None:
    """Gives out rows whose worker died again, until nothing is left or a round makes no progress."""
    store, finished, idle = job.store, set(finished), 0
    while True:
        todo = missing_rows(rows, finished, store.references())
        # A row that kills its worker is recognised at the attempt after the last one.
        if not todo or idle > job.suite.work.retries + 1:
            return
        before = len(finished)
        for summary in engine.stream(job, todo):
            if summary["status"] == STOP:
                raise StoppedError(
                    f"{summary['reason']}. Finished rows are kept: run the same command again to continue"
                )
            if summary["status"] in (DONE, FAILED):
                finished.add(str(summary["id"]))
                watcher.told(summary)
        idle = 0 if len(finished) > before else idle + 1


def _about_run(run: str) -> dict[str, Any]:
    return {"id": run, "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "versions": versions(), "machine": machine()}


def versions() -> dict[str, str | None]:
    """Versions of everything that can change a row, and of what ran it."""
    import importlib.metadata

    return {**doctor.versions(), **{name: importlib.metadata.version(name) for name in ("ray", "pyarrow")}}


def _finish(
    store: Store, suite: Suite, rows: Sequence[Row], manifest: dict[str, Any], command: str, made: int
) -> Evaluation:
    from .report import suite_report
    from .scorers import join_scores

    found = store.rows_of(rows)
    done = [row for row in found if row["status"] == DONE]
    manifest["hashes"] = {row["id"]: row["hash"] for row in done}
    manifest["runs"][-1]["ended"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    write_manifest(store.folder, manifest)
    scores, reasons = join_scores(store.folder, suite, done)
    publish_folder(store.folder / REPORT, suite_report(suite, found, len(rows), scores, reasons, manifest, command))
    if not suite.work.keep_references and len(done) == len(rows):
        store.drop_references()
    failed = len(found) - len(done)
    return Evaluation(len(rows), len(done), failed, made, store.folder / REPORT / "report.html")


def _absolute(suite: Suite) -> Suite:
    """The suite with absolute paths: workers may run in another folder than the driver."""
    if suite.model == WORLD or not os.path.isdir(suite.model):
        return suite
    return replace(suite, model=str(Path(suite.model).resolve()))
