"""Two checkouts in turns: here one beside itself, and a worker that is always slower."""

from pathlib import Path

import pytest

from dev.compare_speed import Worker, measure

TASK = {"tokens": 256, "density": 0.3, "heads": 1, "dim": 16, "warm": 1, "threads": 1}


class Fixed:
    """A worker of known speed."""

    def __init__(self, seconds: float) -> None:
        self.answer = seconds

    def seconds(self, task: dict) -> float:
        return self.answer


def test_the_ratio_is_new_to_old():
    row = measure(Fixed(2.0), Fixed(3.0), TASK, rounds=4)
    assert (row["tokens"], row["old"], row["new"], row["ratio"], row["spread"]) == (256, 2.0, 3.0, 1.5, [1.5, 1.5])


@pytest.mark.slow
def test_a_worker_times_calls_of_its_checkout():
    worker = Worker(Path(__file__).parents[2])
    try:
        assert 0 < worker.seconds(TASK) < 60
    finally:
        worker.close()


def test_a_folder_without_the_package_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="src/residua"):
        Worker(tmp_path)
