"""Which test models of diffusers `accelerate(model, generic=True)` can make sparse.

    python -m dev.benchmarks.generic_models PATH

PATH is a checkout of diffusers, of about the installed version. Every transformer that its tests build is
built as they do, also those that a family knows, and run dense and with Residua under a bound that no head
can keep, so that the outputs must agree. Each is one of

    sparse    some of its calls went through Residua
    dense     it was accepted, and every call stayed dense with a reason
    refused   none of its attention can be reached
    wrong     the outputs differ by more than 2e-5, or removal did not restore the model
    failed    it could not be built or run
"""

import argparse
import importlib
import inspect
import logging
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from residua import Config, ResiduaError, accelerate
from residua.hosts.diffusers.families import base

KEEPS_NOTHING_OUT = Config(density=1.0, max_error=1e-7)


def find_tests(checkout: Path) -> dict[type, list[Any]]:
    """Every model class that the tests of the transformers name, with the tests that say how to build it."""
    sys.path.insert(0, str(checkout))
    found: dict[type, list[Any]] = {}
    for file in sorted((checkout / "tests/models/transformers").glob("test_models_*.py")):
        try:
            module = importlib.import_module(f"tests.models.transformers.{file.stem}")
        except (ImportError, RuntimeError) as error:
            print(f"{file.stem}: not imported: {str(error).splitlines()[0]}")
            continue
        for _, case in inspect.getmembers(module, inspect.isclass):
            if case.__module__ == module.__name__ and hasattr(case, "get_init_dict"):
                test = case()
                found.setdefault(test.model_class, []).append(test)
    return found


def build(model: type, tests: list[Any]) -> tuple[Any, dict[str, Any]]:
    """The model and its inputs from the first test that works: some only change a part of another one."""
    problem: Exception | None = None
    for test in tests:
        try:
            torch.manual_seed(0)
            made, inputs = model(**test.get_init_dict()).eval(), test.get_dummy_inputs()
            for weight in made.parameters():  # many begin with an output layer of zeros
                if not weight.any():
                    torch.nn.init.normal_(weight, std=0.1)
            output(made, inputs)
            return made, inputs
        except Exception as error:
            problem = error
    raise RuntimeError(f"{type(problem).__name__}: {problem}")


def output(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        out = model(**inputs)
    while not isinstance(out, torch.Tensor):
        out = next(iter(out.values() if hasattr(out, "values") else out))
    return out.float()


def classify(model: Any, inputs: dict[str, Any]) -> tuple[str, str]:
    """One of the words above, and why."""
    dense = output(model, inputs)
    with mock.patch.object(base.FAMILIES, "_known", {}):
        try:
            handle = accelerate(model, config=KEEPS_NOTHING_OUT, generic=True, min_tokens=0, steps=4)
        except ResiduaError as error:
            return "refused", str(error).split(": ", 1)[1].split(";")[0]
        out = output(model, inputs)
        total = handle.report().total
        handle.remove()
    if not torch.equal(output(model, inputs), dense):
        return "wrong", "it is not what it was after remove()"
    apart = float((out - dense).abs().max() / dense.abs().max())
    counted = [f"{total.sparse} sparse", *(f"{count} {reason}" for reason, count in total.dense.items())]
    how = "wrong" if not apart <= 2e-5 else "sparse" if total.sparse else "dense"
    return how, f"{', '.join(counted)}; off by {apart:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    for model, tests in find_tests(parser.parse_args().checkout.resolve()).items():
        try:
            how, why = classify(*build(model, tests))
        except Exception as error:
            how, why = "failed", str(error).splitlines()[0]
        counts[how] += 1
        print(f"{how:8} {model.__name__}: {why}", flush=True)
    print(f"{counts.total()} models:", ", ".join(f"{count} {how}" for how, count in counts.most_common()))


if __name__ == "__main__":
    main()
