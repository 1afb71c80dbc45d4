"""The command line: parse, call, print. One file per command; the work is done elsewhere."""

from . import ablate, analyze, bench, capture, compare, demo, doctor, generate, plan, rivals, synthetic
from .app import app

__all__ = [
    "ablate",
    "analyze",
    "app",
    "bench",
    "capture",
    "compare",
    "demo",
    "doctor",
    "generate",
    "plan",
    "rivals",
    "synthetic",
]
