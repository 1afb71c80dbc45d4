"""Measurements behind the figures of the docs: `python -m dev.benchmarks.NAME`."""
