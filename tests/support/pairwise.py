"""Tables of test cases that hold every pair of values of every two axes, instead of every combination."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value per axis: each row is the one that holds most of the pairs that are still missing."""
    cases = list(product(*axes))
    held = [{((i, case[i]), (j, case[j])) for i, j in combinations(range(len(case)), 2)} for case in cases]
    missing, rows = set().union(*held), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(held[i] & missing))
        rows.append(cases[best])
        missing -= held[best]
    return rows
