"""What this machine has: versions, CPU features, and every backend with the reason where it cannot run."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .execution import backends, native

PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "diffusers",
    "transformers",
    "accelerate",
    "triton",
    "flashinfer-python",
)
CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_tile")


@dataclass(frozen=True)
class BackendState:
    name: str
    summary: str
    reason: str | None  # why it cannot run here; None = available
    automatic: bool  # whether backend="auto" may choose it


def versions() -> dict[str, str | None]:
    """Installed versions of everything that matters; None for what is missing."""
    found: dict[str, str | None] = {"residua": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def cpu() -> dict[str, Any]:
    """The processor as the kernels see it."""
    text = ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        text = info.read_text(errors="replace")
    fields = dict(_pair(line) for line in text.splitlines() if ":" in line)
    flags = set(fields.get("flags", "").split())
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "features": [flag for flag in CPU_FLAGS if flag in flags],
        "native_isa": native.isa(),
    }


def gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    names = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        names.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    return names


def backend_states() -> list[BackendState]:
    return [
        BackendState(name, backend.about, backend.unavailable(), backend.priority >= 0)
        for name, backend in backends().items()
    ]


def report() -> dict[str, Any]:
    """Everything, as plain values."""
    return {
        "versions": versions(),
        "cpu": cpu(),
        "gpus": gpus(),
        "backends": [asdict(state) for state in backend_states()],
    }


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()
