"""How fast machines are, as the cost model sees them: sustained rates, each with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Sustained rates of one machine, in TFLOP/s and TB/s."""

    name: str
    label: str
    attention: float  # the dense kernel that a pipeline runs by default
    fast_attention: float | None  # the best dense kernel known for it, where that is another one
    linear: float  # everything else in the transformer: matrix products with their norms and activations
    sparse: float  # exact attention over the selected cells
    grouping: float  # k-means, fp32 or TF32
    bandwidth: float
    call_seconds: float  # launches, sorts and small factorisations of one sparse call
    value_bytes: int
    basis: str


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
    basis="FlashAttention-2 at 70 % of peak; sparse cells at 80 % of that, which nobody has measured for us",
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
    basis="FlashAttention-2 at 90 % of peak; sparse cells at 80 % of that, which nobody has measured for us",
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

MACHINES = {machine.name: machine for machine in (H100, A100, RTX4090, B200, CPU)}
