"""Dense attention as other software computes it: the kernels that a sparse call has to beat."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Kernel = Callable[[], Tensor]


def dense_kernels(q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, Kernel | str]:
    """Every dense kernel by name, or the reason why it is not available. q [B, H, N, D], k/v [B, Hkv, N,
    D]"""
    found: dict[str, Kernel | str] = {"SDPA": partial(_sdpa, q, k, v, scale)}
    if q.device.type != "cuda":
        return found
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        found[f"SDPA {name.lower()}"] = partial(_sdpa, q, k, v, scale, getattr(SDPBackend, name))
    for name, run in (("flash_attn", _flash_attn), ("flashinfer", _flashinfer)):
        missing = find_spec(name) is None
        found[name] = "not installed" if missing else partial(run, q, k, v, scale)
    return found


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, kernel: SDPBackend | None = None) -> Tensor:
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
        grouped = q.shape[1] != k.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from flash_attn import flash_attn_func

    out: Tensor = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale)
    return out.transpose(1, 2)


def _flashinfer(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    import flashinfer

    kernel: Any = flashinfer.single_prefill_with_kv_cache
    by_entry = zip(*(x.transpose(1, 2) for x in (q, k, v)), strict=True)  # [N, H, D]
    return torch.stack([kernel(*same, sm_scale=scale) for same in by_entry]).transpose(1, 2)
