"""Results of a study that nobody measured, for tests of what is made of them."""

from dataclasses import replace

from residua.tools.studies.reconstructions import COMPARISON, Run, at


def made(reconstruction: str, target: float, mean: float, **changes) -> Run:
    run = Run(
        COMPARISON, at(reconstruction, target), "m", "c", mean, 2 * mean, target, target, 4096, target, mean, "", ()
    )
    return replace(run, **changes)
