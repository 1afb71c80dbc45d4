"""Muon for the weight matrices of the blocks, AdamW for everything else."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

# A quintic Newton-Schulz iteration that brings all singular values near 1. These coefficients are not the
# fastest but tolerate rounding: an iterate that bfloat16 pushes beyond 1 is pulled back, where steeper ones
# diverge (occasional updates ten times too long undid the training).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


@lru_cache(maxsize=1)
def fast_bfloat16() -> bool:
    """Whether this processor has bfloat16 products; emulated ones are five times slower."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Muon:
    """Orthogonalised momentum. Matrices of equal shape are batched, because one alone is too small for a
    core."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for param in params:
            self.groups.setdefault(tuple(sorted(param.shape)), []).append(param)
        self.buffers = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the current gradients."""
        for shape, group in self.groups.items():
            grad = torch.stack([_wide(p.grad) for p in group if p.grad is not None])  # [G, short, long]
            buffer = self.buffers[shape].lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(buffer, self.momentum))
            for param, direction in zip(group, update, strict=True):
                rows, columns = param.shape
                direction = direction if rows <= columns else direction.T
                param.add_(direction, alpha=-lr * max(1.0, rows / columns) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"buffers": self.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffers = state["buffers"]


def orthogonalise(matrices: Tensor) -> Tensor:
    """Approximately the nearest (semi-)orthogonal matrices: [G, short, long] -> same."""
    a, b, c = _COEFFICIENTS
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-12)
    if fast_bfloat16():
        x = x.bfloat16()
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


def _wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
