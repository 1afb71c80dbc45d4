"""The GPUs that the static model knows, with the rates that it assumes. None of them was measured by us."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InputError


@dataclass(frozen=True)
class Gpu:
    """What a kernel can use per clock and per second: sustained rates, not the data sheet's peaks."""

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


H100 = Gpu("h100", "NVIDIA H100 SXM", 90, 132, 1.6, 2.3, 5.5, 4096, 228, 64, 365, 620, 54, 30)
H200 = Gpu("h200", "NVIDIA H200", 90, 132, 1.6, 3.8, 5.5, 4096, 228, 64, 365, 620, 54, 30)
A100 = Gpu("a100", "NVIDIA A100 80 GB", 80, 108, 1.3, 1.5, 4.0, 2048, 164, 64, 215, 215, 18, 9)
RTX4090 = Gpu("4090", "NVIDIA RTX 4090", 89, 128, 2.3, 0.85, 4.0, 512, 100, 48, 150, 150, 70, 1.2)
L40S = Gpu("l40s", "NVIDIA L40S", 89, 142, 2.0, 0.75, 4.0, 1024, 100, 48, 220, 220, 75, 1.2)
RTX5090 = Gpu("5090", "NVIDIA RTX 5090", 120, 170, 2.3, 1.5, 6.0, 512, 100, 48, 195, 195, 95, 1.5)
B200 = Gpu("b200", "NVIDIA B200", 100, 148, 1.7, 6.4, 9.0, 8192, 228, 64, 1240, 1600, 70, 35)

GPUS = {gpu.name: gpu for gpu in (H100, H200, A100, RTX4090, L40S, RTX5090, B200)}
ALIASES = {
    "rtx4090": "4090",
    "rtx-4090": "4090",
    "geforce-rtx-4090": "4090",
    "ada": "4090",
    "rtx5090": "5090",
    "rtx-5090": "5090",
    "geforce-rtx-5090": "5090",
    "a100-80gb": "a100",
    "h100-sxm": "h100",
    "hopper": "h100",
    "blackwell": "b200",
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name or alias."""
    key = name.strip().lower().replace(" ", "-").replace("_", "-").removeprefix("nvidia-")
    gpu = GPUS.get(ALIASES.get(key, key))
    if gpu is None:
        raise InputError(f"gpu={name!r}: wanted one of {', '.join(GPUS)} (or {', '.join(ALIASES)})")
    return gpu
