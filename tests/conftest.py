"""Shared by all tests: one torch thread per worker, and the direct computations of `support/` importable."""

import importlib.metadata
import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from residua.ops import backends, choose_backend

os.environ.setdefault("RESIDUA_SELF_TEST", "0")  # GPUs that exist only in a test cannot be tested
if importlib.util.find_spec("triton") and importlib.metadata.version("triton") < "3.5":
    sys.modules["triton"] = None  # torch 2.8 brings one that is too old for the kernels: as if there were none
torch.set_num_threads(1)  # pytest-xdist runs several workers; more threads would fight over the cores

# The same examples every time, however slow the machine is: a run must not turn red by chance.
hypothesis.settings.register_profile(
    "residua", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("residua")


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist would begin with the files of most tests, and leave those that take longest for the end,
    where one worker waits for the other."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, then those of many tests; the order inside of a file stays."""
    tests = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))


def pytest_runtest_setup() -> None:
    """Torch's global generator begins every test in the same state: which tests have drawn from it before in
    this process depends on how fast the workers are."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """What a test changed for the whole process would only hurt those that happen to share it."""
    before = _process()
    yield
    assert _process() == before


def _process() -> dict[str, object]:
    return {
        "folder": os.getcwd(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "interrupt": signal.getsignal(signal.SIGINT),
        **{name: value for name, value in os.environ.items() if name.startswith("RESIDUA")},
    }


@pytest.fixture(params=[("torch", "cpu"), ("torch", "gpu"), ("native", "cpu")], ids="-".join)
def every_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test of the whole call on each CPU backend, and in plain torch by the rules of a GPU: where the test
    asks for "torch", it gets this backend, and where it asks for no rules, these."""
    name, rules = request.param
    backend = backends().get(name)
    reason = "not in this build" if backend is None else backend.unavailable()
    if reason:
        pytest.skip(f"{name}: {reason}")

    def chosen(wanted, demand):
        return choose_backend(name if wanted == "torch" else wanted, demand)

    monkeypatch.setattr("residua.api.choose_backend", chosen)
    monkeypatch.setattr("residua.method.rules.rules_for", lambda device: rules)
    return name
