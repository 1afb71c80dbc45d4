"""The command line: parse, call, print. One file per command; the work is done elsewhere."""

from . import bench, demo, doctor, plan
from .app import app

__all__ = ["app", "bench", "demo", "doctor", "plan"]
