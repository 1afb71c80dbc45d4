"""Leading eigenspaces of small symmetric matrices: all steps of an orthogonal iteration in one launch.

One program per matrix. Orthonormal columns come from the inverse Cholesky factor of their Gram matrix, one
pivot after the other; the columns shrink in proportion to their eigenvalues, which does not hurt a Cholesky
factor, so fp32 is enough.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import load_matrix
from .shapes import padded

MAX_SIZE, MAX_RANK = 128, 64
ROUNDS = 7  # of one, one, two, two ... products: twelve in all
SHIFT = 1e-6  # of the largest entry: keeps every direction alive
PIVOT = 1e-12  # of the largest diagonal entry: below it a direction is lost in rounding


@triton.jit
def cosine(turns):
    """cos(2 pi turns) for 0 <= turns < 1, to 6 digits. The library's own keeps an array on the stack, for
    large arguments."""
    x = 0.5 - tl.abs(turns - 0.5)  # of half a turn, cos is the same on both sides of its middle
    x = (0.25 - tl.abs(x - 0.25)) * 6.283185307179586  # up to a quarter, where the series is short
    z = x * x
    y = 1 - z / 2 * (1 - z / 12 * (1 - z / 30 * (1 - z / 56 * (1 - z / 90))))
    return tl.where(tl.abs(turns - 0.5) < 0.25, -y, y)


@triton.jit
def inverse_root(gram, rank, BR: tl.constexpr, minimum):
    """W with W gram W^T = 1, lower triangular: the inverse of the Cholesky factor.  # [BR, BR] -> the same"""
    rows = tl.arange(0, BR)[:, None]
    cols = tl.arange(0, BR)[None, :]
    inverse = (rows == cols).to(tl.float32)
    largest = tl.max(tl.max(tl.where(rows == cols, gram, 0.0), 1), 0)
    for j in range(0, rank):
        column = tl.sum(tl.where(cols == j, gram, 0.0), 1)  # [BR]
        pivot = tl.sum(tl.where(tl.arange(0, BR) == j, column, 0.0), 0)
        root = 1.0 / tl.sqrt(tl.maximum(pivot, minimum * largest + 1e-37))
        gram_row = tl.sum(tl.where(rows == j, gram, 0.0), 0) * root
        inverse_row = tl.sum(tl.where(rows == j, inverse, 0.0), 0) * root
        below = tl.where(tl.arange(0, BR) > j, column * root, 0.0)[:, None]
        gram -= below * gram_row[None, :]
        inverse = tl.where(rows == j, inverse_row[None, :], inverse - below * inverse_row[None, :])
    return inverse


@triton.jit
def multiply(MATRIX, SOURCE, TARGET, shift, size, n, rank, BN: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """TARGET = MATRIX / size @ SOURCE + shift * SOURCE, all in global memory."""
    rows = tl.arange(0, BN)
    cols = tl.arange(0, BR)
    own = (rows < n)[:, None] & (cols < rank)[None, :]
    y = load_matrix(SOURCE, rows, cols, n, rank) * shift
    for first in tl.range(0, n, BK, num_stages=1):
        inner = first + tl.arange(0, BK)
        a = load_matrix(MATRIX, rows, inner, n, n) / size
        b = load_matrix(SOURCE, inner, cols, n, rank)
        y = tl.dot(a, b, y, input_precision="tf32x3")
    tl.debug_barrier()  # SOURCE may be TARGET
    tl.store(TARGET + rows[:, None] * rank + cols[None, :], y, mask=own)
    tl.debug_barrier()


@triton.jit
def inner_products(LEFT, RIGHT, n, rank, BR: tl.constexpr, BK: tl.constexpr):
    """LEFT^T @ RIGHT of two [n, rank] in global memory.  # [BR, BR]"""
    cols = tl.arange(0, BR)
    gram = tl.zeros([BR, BR], tl.float32)
    for first in tl.range(0, n, BK, num_stages=1):
        rows = first + tl.arange(0, BK)
        left = load_matrix(LEFT, rows, cols, n, rank)
        right = load_matrix(RIGHT, rows, cols, n, rank)
        gram = tl.dot(tl.trans(left), right, gram, input_precision="tf32x3")
    return gram


@triton.jit
def turn_columns(SOURCE, TARGET, inverse, n, rank, BR: tl.constexpr, BK: tl.constexpr):
    """TARGET = SOURCE @ inverse^T, both [n, rank] in global memory."""
    cols = tl.arange(0, BR)
    for first in tl.range(0, n, BK, num_stages=1):
        rows = first + tl.arange(0, BK)
        at = rows[:, None] * rank + cols[None, :]
        mask = (rows < n)[:, None] & (cols < rank)[None, :]
        x = tl.load(SOURCE + at, mask=mask, other=0.0)
        x = tl.dot(x, tl.trans(inverse), input_precision="tf32x3")
        tl.debug_barrier()  # SOURCE may be TARGET
        tl.store(TARGET + at, x, mask=mask)
    tl.debug_barrier()


@triton.jit
def subspace_kernel(
    MATRIX,  # [G, n, n] fp32
    OUT,  # [G, n, rank] fp32
    WORK,  # [G, n, rank] fp32
    n,
    rank,
    rounds,
    shift,
    minimum,
    length,  # sqrt(2 / n)
    BN: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    FACTOR: tl.constexpr,  # F with F F^T = the matrix in that space, over its mean eigenvalue; or the basis
):
    """One program: one matrix. OUT = an orthonormal basis of its leading eigenspace, or the factor of the matrix in it,
    by an orthogonal iteration."""
    head = tl.program_id(0).to(tl.int64)
    MATRIX += head * n * n
    OUT += head * n * rank
    WORK += head * n * rank
    rows = tl.arange(0, BN)
    cols = tl.arange(0, BR)
    # the largest entry, by which the matrix is divided
    size = tl.zeros([BN], tl.float32)
    for first in tl.range(0, n, BK, num_stages=1):
        inner = first + tl.arange(0, BK)
        entries = load_matrix(MATRIX, rows, inner, n, n)
        size = tl.maximum(size, tl.max(tl.abs(entries), 1))
    size = tl.maximum(tl.max(size, 0), 1e-37)
    # the first columns of the cosine transform: orthonormal, dense, the same on every device
    # (counted in whole quarters of 1 / n turns)
    start = cosine(((2 * rows + 1)[:, None] * cols[None, :] % (4 * n)).to(tl.float32) / (4 * n)) * length
    own = (rows < n)[:, None] & (cols < rank)[None, :]
    tl.store(OUT + rows[:, None] * rank + cols[None, :], start, mask=own)
    tl.debug_barrier()
    for step in tl.range(0, rounds + 1, num_stages=1, disable_licm=True):
        # two products between the later factors; after the last one only a factor: one pass loses digits
        for _ in range(0, tl.where(step < rounds, tl.where(step < 2, 1, 2), 0)):
            multiply(MATRIX, OUT, OUT, shift, size, n, rank, BN, BR, BK)
        inverse = inverse_root(inner_products(OUT, OUT, n, rank, BR, BK), rank, BR, minimum)
        turn_columns(OUT, OUT, inverse, n, rank, BR, BK)
    # F = basis @ upper with upper^T upper = basis^T matrix basis / mean
    if FACTOR:
        multiply(MATRIX, OUT, WORK, 0.0, size, n, rank, BN, BR, BK)
        gram = inner_products(OUT, WORK, n, rank, BR, BK)
        mean = tl.sum(tl.sum(tl.where(cols[:, None] == cols[None, :], gram, 0.0), 1), 0) / rank
        inverse = inverse_root(gram, rank, BR, minimum) / tl.sqrt(tl.maximum(mean, 1e-37))
        # W gram is the transposed root. The products are summed again: held through the loop they would cost
        # registers. WORK @ W^T would be cheaper, and is the same only where the iteration has converged
        gram = inner_products(OUT, WORK, n, rank, BR, BK)
        upper = tl.dot(inverse, gram, input_precision="tf32x3")
        turn_columns(OUT, OUT, upper, n, rank, BR, BK)


def fits(matrix: Tensor, rank: int) -> bool:
    """Whether one program can hold the matrix and its basis."""
    return matrix.shape[-1] <= MAX_SIZE and rank <= MAX_RANK


def leading_space(matrix: Tensor, rank: int, factor: bool) -> Tensor:
    """Orthonormal columns that span about the leading eigenvectors of matrix [..., n, n], or the factor F of
    the matrix in that space, in units of its mean eigenvalue there.  # [..., n, rank] fp32"""
    size = matrix.shape[-1]
    flat = matrix.float().reshape(-1, size, size).contiguous()
    out = torch.empty(*flat.shape[:2], rank, dtype=torch.float32, device=matrix.device)
    if out.numel():
        sizes = (size, rank, ROUNDS, SHIFT, PIVOT, math.sqrt(2 / size))
        blocks = {"BN": padded(size), "BR": padded(rank), "BK": 16, "FACTOR": factor}
        work = torch.empty_like(out)
        subspace_kernel[(flat.shape[0],)](flat, out, work, *sizes, **blocks, num_warps=8, num_stages=1)
    return out.view(*matrix.shape[:-1], rank)
