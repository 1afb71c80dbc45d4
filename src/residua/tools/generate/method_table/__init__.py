"""Compares methods on a whole model: the paper's Table 1 and its runtime figure."""

from .measure import Measured, MethodRow, chosen_methods, measure, read_pbench
from .report import MAX_WAITING, make_report, result_files

__all__ = [
    "MAX_WAITING",
    "Measured",
    "MethodRow",
    "chosen_methods",
    "make_report",
    "measure",
    "read_pbench",
    "result_files",
]
