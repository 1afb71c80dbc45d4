"""Estimates what a video will cost, dense and sparse, without running it: tokens, FLOPs, memory, time."""

from .models import MODELS, Architecture
from .plan import Plan
from .request import make_plan
from .speeds import MACHINES

__all__ = ["MACHINES", "MODELS", "Architecture", "Plan", "make_plan"]
