"""Other training-free methods at the same density, on the same calls, with the same accounting."""

# in the order of the tables
from . import dense, oracle, window, sparge, xattention, pisa, svg2, svoo, svg_ear  # isort: skip
from . import hard_drop, sparsepr, anchored  # isort: skip
from .base import RIVALS, Outcome, Rival, Task, find, register

__all__ = [
    "RIVALS",
    "Outcome",
    "Rival",
    "Task",
    "anchored",
    "dense",
    "find",
    "hard_drop",
    "oracle",
    "pisa",
    "register",
    "sparge",
    "sparsepr",
    "svg2",
    "svg_ear",
    "svoo",
    "window",
    "xattention",
]
