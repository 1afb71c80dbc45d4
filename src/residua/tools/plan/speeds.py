"""The speed of machines for the cost model: sustained rates, each with its source; and their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ...util.spelling import did_you_mean
from .rows import read_rows


@dataclass(frozen=True)
class Machine:
    """Sustained rates of one machine, in TFLOP/s and TB/s."""

    name: str
    label: str
    attention: float  # the dense kernel that a pipeline runs by default
    linear: float  # everything else in the transformer: matrix products with norms and activations
    sparse: float  # exact attention over the selected cells
    grouping: float  # k-means, fp32 or TF32
    bandwidth: float
    call_seconds: float  # launches, sorts and small factorisations of one sparse call
    value_bytes: int
    basis: str
    fast_attention: float | None = None  # the fastest known dense kernel, if that is another one
    memory: float | None = None  # GiB that a program can use; None: unknown
    link: float = 20.0  # GB/s from main memory to the GPU's, for offloading


def _machine(name: str, aliases: tuple[str, ...] = (), **fields: Any) -> Machine:
    return Machine(name, **fields)


_ROWS = read_rows("machines.toml")
MACHINES = {name: _machine(name, **row) for name, row in _ROWS.items()}
ALIASES = {alias: name for name, row in _ROWS.items() for alias in row.get("aliases", ())}
AMD = ("mi300x", "mi300", "mi325x", "mi250x", "mi350x", "mi355x")


def find_machine(name: object) -> Machine:
    """The machine of a name as users write it: h100, rtx4090, "GeForce RTX 5090", l40s, cpu."""
    known = ", ".join(MACHINES)
    if not isinstance(name, str):
        raise InputError(f"gpu={name!r}: wanted one of {known}")
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    key = key.removeprefix("nvidia-").removeprefix("geforce-")
    if key in AMD:
        raise InputError(
            f"gpu={name!r}: not modelled; Residua's kernels were compiled for NVIDIA alone: wanted {known}"
        )
    for candidate in (key, ALIASES.get(key, key), key.removeprefix("rtx").removeprefix("-")):
        if candidate in MACHINES:
            return MACHINES[candidate]
    raise InputError(f"gpu={name!r}: wanted one of {known}{did_you_mean(key, [*MACHINES, *ALIASES])}")
