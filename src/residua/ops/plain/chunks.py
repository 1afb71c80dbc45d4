"""Work is cut into chunks so that a temporary never exceeds about `CHUNK_BYTES`, whatever N is."""

from __future__ import annotations

CHUNK_BYTES = 64 << 20


def chunk_rows(row_bytes: int, total: int) -> int:
    """How many of `total` rows of that many bytes are worked on at a time; at least one."""
    return max(1, min(total, CHUNK_BYTES // max(1, row_bytes)))
