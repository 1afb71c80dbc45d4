"""The speed of machines for the cost model: sustained rates, each with its source; and their memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import InputError
from ...util.spelling import did_you_mean


@dataclass(frozen=True)
class Machine:
    """Sustained rates of one machine, in TFLOP/s and TB/s."""

    name: str
    label: str
    attention: float  # the dense kernel that a pipeline runs by default
    fast_attention: float | None  # the fastest known dense kernel, if that is another one
    linear: float  # everything else in the transformer: matrix products with norms and activations
    sparse: float  # exact attention over the selected cells
    grouping: float  # k-means, fp32 or TF32
    bandwidth: float
    call_seconds: float  # launches, sorts and small factorisations of one sparse call
    value_bytes: int
    basis: str
    memory: float | None = None  # GiB that a program can use; None: unknown
    link: float = 20.0  # GB/s from main memory to the GPU's, for offloading


H100 = Machine(
    name="h100",
    label="one NVIDIA H100 (SXM), bf16",
    attention=365.0,
    fast_attention=620.0,
    linear=500.0,
    sparse=460.0,
    grouping=100.0,
    bandwidth=2.3,
    call_seconds=5e-3,
    value_bytes=2,
    basis="the dense and sparse attention rates are solved from the paper's Wan2.2 times (1650 s and 917 s), "
    "with matrix products at half of peak; 365 TFLOP/s is near what FlashAttention-2 reaches, 620 is "
    "published for FlashAttention-3; the rest is assumed, and nothing was measured by us on a GPU",
    memory=79,
    link=40,
)
A100 = Machine(
    name="a100",
    label="one NVIDIA A100 (80 GB), bf16",
    attention=215.0,
    fast_attention=None,
    linear=190.0,
    sparse=170.0,
    grouping=50.0,
    bandwidth=1.4,
    call_seconds=5e-3,
    value_bytes=2,
    basis="FlashAttention-2 at 70 % of peak; sparse cells at 80 % of that, which is a guess",
    memory=79,
    link=20,
)
RTX4090 = Machine(
    name="4090",
    label="one NVIDIA RTX 4090, bf16",
    attention=150.0,
    fast_attention=None,
    linear=135.0,
    sparse=120.0,
    grouping=35.0,
    bandwidth=0.7,
    call_seconds=5e-3,
    value_bytes=2,
    basis="FlashAttention-2 at 90 % of peak; sparse cells at 80 % of that, which is a guess",
    memory=23.5,
    link=20,
)
B200 = Machine(
    name="b200",
    label="one NVIDIA B200, bf16",
    attention=1240.0,
    fast_attention=1600.0,
    linear=1200.0,
    sparse=480.0,
    grouping=200.0,
    bandwidth=5.6,
    call_seconds=5e-3,
    value_bytes=2,
    basis="cuDNN 9.13 and FlashAttention-4 as published (1613 TFLOP/s, 1.3 x cuDNN, 2.7 x Triton); sparse "
    "cells at 80 % of the Triton rate, because no variable-block kernel for Blackwell is known to us",
    memory=178,
    link=40,
)
CPU = Machine(
    name="cpu",
    label="a CPU with 8 AVX-512 cores, fp32",
    attention=0.75,
    fast_attention=None,
    linear=0.80,
    sparse=0.74,
    grouping=0.40,
    bandwidth=0.04,
    call_seconds=2e-3,
    value_bytes=4,
    basis="about 0.1 TFLOP/s per core, torch's dense attention at 92 % of matrix peak, and sparse cells at "
    "1.02 x the ideal time, as a prototype of the native kernel took on one thread; times scale with the "
    "cores, speed-ups hardly do",
)

NOT_MEASURED = "; sparse cells at 80 % of dense, which is a guess"
H200 = replace(
    H100,
    name="h200",
    label="one NVIDIA H200, bf16",
    bandwidth=3.8,
    memory=140,
    basis=f"the processors of an H100 with more and faster memory: {H100.basis}",
)
A100_40 = replace(A100, name="a100-40gb", label="one NVIDIA A100 (40 GB), bf16", bandwidth=1.2, memory=39.5)
L40S = replace(
    RTX4090,
    name="l40s",
    label="one NVIDIA L40S, bf16",
    attention=220.0,
    linear=200.0,
    sparse=176.0,
    bandwidth=0.7,
    memory=44.5,
    basis="FlashAttention-2 at 60 % of peak" + NOT_MEASURED,
)
RTX6000ADA = replace(L40S, name="rtx6000-ada", label="one NVIDIA RTX 6000 Ada, bf16", bandwidth=0.8, memory=47.5)
RTX5090 = replace(
    RTX4090,
    name="5090",
    label="one NVIDIA RTX 5090, bf16",
    attention=195.0,
    linear=180.0,
    sparse=156.0,
    grouping=45.0,
    bandwidth=1.5,
    memory=31.5,
    link=40,
    basis="FlashAttention-2 at 93 % of the rate with fp32 sums" + NOT_MEASURED,
)
A6000 = replace(
    RTX4090,
    name="a6000",
    label="one NVIDIA RTX A6000, bf16",
    attention=95.0,
    linear=95.0,
    sparse=76.0,
    grouping=18.0,
    bandwidth=0.6,
    memory=47.5,
    basis="FlashAttention-2 at 60 % of peak" + NOT_MEASURED,
)
RTX3090 = replace(
    A6000,
    name="3090",
    label="one NVIDIA RTX 3090, bf16",
    attention=63.0,
    linear=60.0,
    sparse=50.0,
    bandwidth=0.75,
    memory=23.5,
    basis="FlashAttention-2 at 89 % of the rate with fp32 sums" + NOT_MEASURED,
)

MACHINES = {
    machine.name: machine
    for machine in (H100, H200, B200, A100, A100_40, L40S, RTX6000ADA, A6000, RTX5090, RTX4090, RTX3090, CPU)
}
ALIASES = {
    "h100-sxm": "h100",
    "h100-80gb": "h100",
    "hopper": "h100",
    "a100-80gb": "a100",
    "blackwell": "b200",
    "rtx-a6000": "a6000",
    "rtxa6000": "a6000",
    "6000-ada": "rtx6000-ada",
    "rtx-6000-ada": "rtx6000-ada",
    "rtx6000ada": "rtx6000-ada",
    "l40": "l40s",
}
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
