"""JSON that every reader accepts: NaN and Inf become null, because JSON has neither."""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any, TypeGuard


def finite_only(value: Any) -> Any:
    """The same structure with None for NaN and Inf."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_only(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_only(item) for item in value]
    return value


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value of a file is a number that a float can hold; JSON integers may be too large for one."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def dumps(value: Any, indent: int | None = None) -> str:
    """Valid JSON, whatever the numbers are."""
    return json.dumps(finite_only(value), indent=indent, allow_nan=False)
