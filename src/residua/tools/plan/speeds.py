"""The speed of machines for the cost model: sustained rates, each with its source; and their memory. None of the GPUs
was measured by us."""

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


@dataclass(frozen=True)
class Gpu:
    """What a kernel can use per clock and per second, for the static model: sustained rates, not the data sheet's
    peaks."""

    name: str
    label: str
    arch: int  # as in sm_90
    processors: int
    ghz: float
    bandwidth: float  # TB/s of device memory
    cache_bandwidth: float  # TB/s of the second-level cache
    mma: int  # bf16 FLOPs per clock of a processor's tensor cores
    shared: int  # KiB of shared memory per processor
    warps: int  # that a processor holds at most
    dense: float  # TFLOP/s of the dense attention kernel that pipelines run (FlashAttention-2)
    fast_dense: float  # TFLOP/s of the best dense kernel published for it
    fp32: float  # TFLOP/s of plain fp32 arithmetic
    fp64: float  # TFLOP/s

    @property
    def clock(self) -> float:
        return self.ghz * 1e9


def _machine(name: str, aliases: tuple[str, ...] = (), chip: Any = None, **fields: Any) -> Machine:
    return Machine(name, **fields)


def _gpu(name: str, chip: dict[str, Any]) -> Gpu:
    machine = MACHINES[name]
    dense, fast = machine.attention, machine.fast_attention
    return Gpu(**{"name": name, "bandwidth": machine.bandwidth, "dense": dense, "fast_dense": fast or dense, **chip})


_ROWS = read_rows("machines.toml")
MACHINES = {name: _machine(name, **row) for name, row in _ROWS.items()}
GPUS = {name: _gpu(name, row["chip"]) for name, row in _ROWS.items() if "chip" in row}
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


def find_gpu(name: str) -> Gpu:
    """The GPU of such a name, for the static model."""
    gpu = GPUS.get(find_machine(name).name)
    if gpu is None:
        raise InputError(f"gpu={name!r}: not in the static model; wanted one of {', '.join(GPUS)}")
    return gpu
