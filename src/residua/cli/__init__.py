"""The command line: parse, call, print. One file per command; the work is done elsewhere."""

from . import bench, capture, compare, demo, doctor, evaluate, generate, plan, studies, tune
from .app import app

__all__ = [
    "app",
    "bench",
    "capture",
    "compare",
    "demo",
    "doctor",
    "evaluate",
    "generate",
    "plan",
    "studies",
    "tune",
]
