"""What this machine has: versions, CPU features, and every backend with the reason where it cannot run."""

import importlib.metadata
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..api import attention
from ..config import Config
from ..errors import BackendError
from ..ops import backends, native
from ..ops.self_test import record, run_self_test
from ..state import State
from .bench.case import milliseconds

PACKAGES = ("torch", "numpy", "safetensors", "diffusers", "transformers", "accelerate", "triton", "flashinfer-python")
CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_tile")


def installed(package: str) -> str | None:
    """The version of a package.

    Args:
        package: Its name on PyPI.

    Returns:
        The version; None if it is missing.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that matter; None for a missing one."""
    own = {"residua": __version__, "python": platform.python_version()}
    return own | {package: installed(package) for package in PACKAGES}


def cpu() -> dict[str, Any]:
    """The processor as the kernels see it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in pairs}
    flags = set(fields.get("flags", "").split())
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "features": [flag for flag in CPU_FLAGS if flag in flags],
        "native_isa": native.isa(),
    }


def gpus() -> list[str]:
    """Names of the CUDA devices that torch sees."""
    if not torch.cuda.is_available():
        return []
    names = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        names.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    return names


def backend_states() -> list[dict[str, Any]]:
    """Every backend, best first, with the reason why it cannot run here (None: it can), and whether backend="auto" may
    choose it."""
    return [
        {"name": name, "summary": x.about, "reason": x.unavailable(), "automatic": x.preference >= 0}
        for name, x in backends().items()
    ]


def self_test(device: torch.device | None = None) -> list[dict[str, Any]]:
    """Tests every GPU backend that can run here: its kernels against plain torch, and one warm call against
    SDPA. The result is stored: a backend that failed is not chosen later.

    Args:
        device: A GPU; None: the current one.

    Returns:
        One row per backend: its name, why it failed (None: it passed), a verdict in words, and the checks.
    """
    if device is None:
        if not torch.cuda.is_available():
            raise BackendError(
                f"torch {torch.__version__} sees no CUDA device, so there is no GPU kernel to test; "
                "run it on a machine with a GPU"
            )
        device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for name, backend in backends().items():
        if backend.preference < 0 or not backend.gpu_by_itself or backend.unavailable():
            continue
        if backend.devices is not None and device.type not in backend.devices:
            continue
        checks = run_self_test(backend, device)
        reason = record(backend, device, checks)
        plain = [{**asdict(check), "passed": check.passed} for check in checks]
        verdict = reason or _timed(name, device)
        rows.append({"backend": name, "reason": reason, "verdict": verdict, "checks": plain})
    return rows


def _timed(name: str, device: torch.device) -> str:
    """One warm call beside SDPA, in words."""
    q, k, v = (torch.randn(1, 8, 16384, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    state, config = State(), Config(backend=name)
    attention(q, k, v, config, state)

    sparse = milliseconds(lambda: attention(q, k, v, config, state), 2, device)
    dense = milliseconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v), 2, device)
    return (
        f"all kernels of {name} passed; a warm call (16,384 tokens x 8 heads, density 0.22) takes "
        f"{sparse:.2f} ms, SDPA {dense:.2f} ms"
    )


def report() -> dict[str, Any]:
    """Everything, as plain values."""
    return {"versions": versions(), "cpu": cpu(), "gpus": gpus(), "backends": backend_states()}
