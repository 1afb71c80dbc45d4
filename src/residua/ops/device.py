"""What plain torch must know of a device: whether it may be asked, and how much a temporary may hold."""

from __future__ import annotations

from torch import Tensor

CHUNK_BYTES = 64 << 20


def on_cpu(x: Tensor) -> bool:
    """Whether results can be looked at without waiting, and sums have a fixed order, as they do not on a GPU."""
    return x.device.type == "cpu"


def chunk_rows(row_bytes: int, total: int) -> int:
    """How many of `total` rows of that many bytes are worked on at a time; at least one.

    Work is cut into chunks so that a temporary never exceeds about `CHUNK_BYTES`, whatever N is.
    """
    return max(1, min(total, CHUNK_BYTES // max(1, row_bytes)))
