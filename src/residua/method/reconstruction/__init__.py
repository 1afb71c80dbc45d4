"""What stands for the pairs that are skipped: the reconstructions, each a registered class."""

from ...types import Choice
from .anchored import Anchored
from .base import RECONSTRUCTIONS, GroupedCall, Reconstruction, Routing, Verdict
from .probe import ProbeFit
from .tail import Tail

__all__ = [
    "RECONSTRUCTIONS",
    "Anchored",
    "Choice",
    "GroupedCall",
    "ProbeFit",
    "Reconstruction",
    "Routing",
    "Tail",
    "Verdict",
]
