"""From how many tokens on sparse attention saves time on a GPU: estimates, not measurements."""

from __future__ import annotations

# By the stored estimates (`residua.tools.plan.estimates`), which a test holds these numbers to.
BREAK_EVEN = {"h100": 8192, "h200": 8192, "a100": 7168, "4090": 6144, "l40s": 8192, "5090": 6144, "b200": 17408}


def nearest_gpu(name: str, capability: tuple[int, int]) -> str:
    """The GPU of the table that a real one is taken for: by its name, otherwise by its generation."""
    by_name = [gpu for gpu in BREAK_EVEN if gpu in name.lower()]
    if by_name:
        return by_name[0]
    by_generation = {8: "4090" if capability[1] else "a100", 9: "h100", 10: "b200", 12: "5090"}
    found = by_generation.get(capability[0], "h100")
    return found if found in BREAK_EVEN else next(iter(BREAK_EVEN))
