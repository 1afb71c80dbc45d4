"""The contract of every primitive of a call, by subject, with its version in plain torch.

The bodies that are longer than a few lines are in `plain/`. A backend overrides what it does better.
"""

from .grouping import GroupingPrimitives
from .numbers import NumberPrimitives
from .routing import RoutingPrimitives
from .rows import RowPrimitives
from .summary import SummaryPrimitives

__all__ = ["GroupingPrimitives", "NumberPrimitives", "RoutingPrimitives", "RowPrimitives", "SummaryPrimitives"]
