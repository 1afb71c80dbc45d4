"""The command line, one file per command. A command parses, calls and prints; the work is done elsewhere."""

from . import bench, capture, compare, demo, doctor, evaluate, generate, plan, studies, tune
from .app import app

__all__ = ["app", "bench", "capture", "compare", "demo", "doctor", "evaluate", "generate", "plan", "studies", "tune"]
