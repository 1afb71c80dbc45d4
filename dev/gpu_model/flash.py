"""A plain dense attention kernel in the manner of FlashAttention-2: the yardstick for the sparse one. It is
compiled for the comparison and never run."""

# mypy: allow-untyped-defs
import torch
import triton
import triton.language as tl

from dev.gate.compile import compile_only
from dev.gpu_model.model import STALL, Estimate
from dev.gpu_model.sass import Code, read_code

TILES = (128, 64, 8, 3)  # rows, keys, warps, stages: those of the sparse kernel


@triton.jit
def flash_kernel(
    Q,  # [H, N, D], as K, V and OUT
    K,
    V,
    OUT,
    LSE,  # [H, N] fp32
    scale,
    N,
    sh,
    sn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    Q += head * sh
    K += head * sh
    V += head * sh
    OUT += head * sh
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    keys = tl.arange(0, BN)
    q = tl.load(Q + rows[:, None] * sn + dims[None, :], mask=(rows < N)[:, None], other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    k_tile = K + keys[None, :] * sn + dims[:, None]
    v_tile = V + keys[:, None] * sn + dims[None, :]
    for _ in range(0, N // BN):
        k = tl.load(k_tile)
        v = tl.load(v_tile)
        scores = tl.dot(q, k)
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = new_top
        k_tile += BN * sn
        v_tile += BN * sn
    acc /= total[:, None]
    tl.store(OUT + rows[:, None] * sn + dims[None, :], acc.to(OUT.dtype.element_ty), mask=(rows < N)[:, None])
    tl.store(LSE + head * N + rows, top + tl.log2(total), mask=rows < N)


def compile_flash(arch: int, head_dim: int = 128) -> Code:
    """The kernel compiled for sm_`arch`, bf16, at a length that is a multiple of its tiles."""
    tokens, heads = 75776, 40
    x = torch.empty(heads, tokens, head_dim, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(heads, tokens, device="meta")
    rows, keys, warps, stages = TILES
    sizes = {"BM": rows, "BN": keys, "D": head_dim, "num_warps": warps, "num_stages": stages}
    with compile_only(arch) as seen:
        flash_kernel[(tokens // rows, heads)](x, x, x, x, lse, 0.1, tokens, x.stride(0), x.stride(1), **sizes)
    return read_code(seen[0])


def flash_ms(found: Estimate, code: Code) -> float:
    """Dense attention by that kernel, in the terms of the same model."""
    rows, keys, *_ = TILES
    gpu, task, loop = found.gpu, found.task, code.products[0]
    trips = task.heads * -(-task.tokens // rows) * -(-task.tokens // keys)
    flops = 4 * rows * keys * task.head_dim
    turns = code.warps / 4
    cycles = max(turns * loop.instructions, flops / gpu.mma + turns * loop.dependent)
    return 1e3 * STALL * trips * cycles / gpu.processors / gpu.clock
