"""Methods of sparse attention by name, Residua's own and those of others, each a file that registers it: one contract,
the same calls, the same accounting."""

# in the order of the tables
from . import oracle, window, sparge, xattention, pisa, svg2, svoo, svg_ear, own  # noqa: F401  # isort: skip
from .methods import DEFAULT, METHODS, Method, find_method, method_names
from .task import Outcome, Task

__all__ = ["DEFAULT", "METHODS", "Method", "Outcome", "Task", "find_method", "method_names"]
