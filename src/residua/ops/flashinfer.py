"""FlashInfer as the attention kernel: its paged wrapper with pages of one token, and its variable-block one.

A query group is one request of FlashInfer's batch, and the keys it keeps are its pages. The other primitives
are those of the Triton backend. FlashInfer plans on the host, so a call waits for the device; our own index
expansion keeps the token lists on the device, a few heads at a time.
"""

import math
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import BackendError
from ..types import Route, SummaryKeys
from .backend import BACKENDS, Demand
from .triton import TritonBackend
from .triton.entry import entry, explained, launched, missing_triton

MIN_VERSION = (0, 7)
CAPABILITIES = ((8, 0), (9, 0))  # GPUs for which its fa2 and fa3 kernels are the fastest known
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20
INDEX_LIMIT = 64 << 20  # token indices of one plan, 256 MiB as int32
INT32 = 2**31 - 1
_LOCAL = threading.local()  # two threads must not share a workspace


def missing_flashinfer() -> str | None:
    """Why FlashInfer cannot run on this machine at all, or None."""
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return "FlashInfer is not installed: pip install flashinfer-python"
    if tuple(int(part) for part in found.split(".")[:2]) < MIN_VERSION:
        return f"FlashInfer {found}: wanted 0.7 or newer"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not _can_build():
        return (
            "FlashInfer compiles its kernels on first use and finds no nvcc: install the CUDA toolkit (or "
            "set CUDA_HOME), or pip install flashinfer-jit-cache"
        )
    try:
        import flashinfer  # noqa: F401  # imported late, because it takes seconds
    except ImportError as error:
        return f"FlashInfer {found} cannot be imported: {error}"
    return missing_triton()


def _can_build() -> bool:
    """Whether FlashInfer has its kernels, or a compiler to build them."""
    if find_spec("flashinfer_jit_cache") is not None:
        return True
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    found = [Path(home, "bin", "nvcc") for home in (*homes, "/usr/local/cuda") if home]
    return shutil.which("nvcc") is not None or any(path.exists() for path in found)


@dataclass(frozen=True)
class Batch:
    """Some heads of a call as FlashInfer sees them, in group-major order; the last group of rows and of keys
    holds the tokens without a group."""

    heads: slice  # of the B * H flattened heads
    kv_heads: Tensor  # [heads] int64, of the B * Hkv flattened ones
    row_sizes: Tensor  # [heads, Cq + 1] int64
    key_sizes: Tensor  # [heads, Ck + 1] int64
    cells: Tensor  # [heads, Cq + 1, Ck + 1] bool
    kept: Tensor  # [heads, Cq + 1] int64, keys that each group of rows sees


@BACKENDS.register
class FlashInferBackend(TritonBackend):
    name: ClassVar[str] = "flashinfer"
    about: ClassVar[str] = "FlashInfer's paged attention with pages of one token; sm_80 to sm_90"
    preference: ClassVar[int] = 30  # below Triton, unless `residua bench gpu` found it faster here
    deterministic: ClassVar[bool] = False  # FlashInfer does not promise it
    devices: ClassVar[tuple[str, ...] | None] = ("cuda",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    head_dims: ClassVar[tuple[int, int]] = (HEAD_DIMS[0], HEAD_DIMS[-1])

    def unavailable(self) -> str | None:
        return missing_flashinfer()

    def reasons(self, demand: Demand) -> list[str]:
        found = super().reasons(demand)
        if demand.head_dim != demand.value_dim or demand.head_dim not in HEAD_DIMS:
            dims = f"head_dim={demand.head_dim} with value head_dim={demand.value_dim}"
            found.append(f"{dims}: takes equal ones of {', '.join(map(str, HEAD_DIMS))}")
        if not found:
            capability = torch.cuda.get_device_capability(demand.device)
            if not CAPABILITIES[0] <= capability <= CAPABILITIES[1]:
                found.append(f"sm_{capability[0]}{capability[1]}: takes sm_80 to sm_90; backend='triton' takes newer")
        return found

    join_rows = launched("join_rows", "join")

    @entry
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        route: Route,
        scale: float,
        summary: SummaryKeys | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch, heads, rows, dim = q.shape
        # the copies that the stages before have made, and that the Triton backend would read
        keys, values = self.group_major(k, route.kv), self.group_major(v, route.kv, values=True)
        if summary is not None:  # these keys alone, and in the dtype of the result: nothing is copied later
            kv = replace(route.kv, offsets=route.kv.offsets[..., :1])
            nothing = Route(route.query, kv, route.cells[..., :0])
            out, lse = super().attend(q, k, v, nothing, scale, summary, out_dtype or q.dtype)
        else:
            out = torch.zeros(batch, heads, rows, dim, dtype=out_dtype or q.dtype, device=q.device)
            lse = torch.full((batch, heads, rows), -torch.inf, device=q.device)
        query = self.gather_rows(q, route.query.order).flatten(0, 1)
        order, all_out, all_lse = (x.flatten(0, 1) for x in (route.query.order, out, lse))
        for part in batches(route, dim):
            found, found_lse = self._run(query[part.heads], keys, values, part, scale)
            sees = part.kept.gather(1, _group_of_row(part.row_sizes, rows)) > 0  # [heads, rows]
            found_lse = torch.where(sees, found_lse * math.log(2), -torch.inf)
            self.join_rows(all_out[part.heads], all_lse[part.heads], found, found_lse, order[part.heads])
        return out, lse

    def _run(self, q: Tensor, k: Tensor, v: Tensor, part: Batch, scale: float) -> tuple[Tensor, Tensor]:
        """q [heads, N, D] over group-major k, v [B, Hkv, Nk, D] -> out as q, base-2 LSE [heads, N]"""
        heads, rows, dim = q.shape
        indptr = _running(part.kept)
        indices = expand(part, k.shape[2], int(indptr[-1]))
        # a group without keys has no last page; FlashInfer's planner would count one key for it
        last = (part.kept.flatten() > 0).int()
        wrapper = _wrapper("BatchPrefillWithPagedKVCacheWrapper", q)
        sizes = _running(part.row_sizes)
        with explained("FlashInfer", "triton"):
            wrapper.plan(sizes, indptr, indices, last, 1, 1, dim, 1, sm_scale=scale, q_data_type=q.dtype)
            pages = (k.view(-1, 1, 1, dim), v.view(-1, 1, 1, dim))
            out, lse = wrapper.run(q.reshape(heads * rows, 1, dim), pages, return_lse=True)
        return out.view(heads, rows, dim), lse.view(heads, rows)


@BACKENDS.register
class FlashInferBlocks(FlashInferBackend):
    name: ClassVar[str] = "flashinfer-blocks"
    about: ClassVar[str] = "FlashInfer's variable-block wrapper; copies its token lists to the host, by name only"
    preference: ClassVar[int] = -1

    def _run(self, q: Tensor, k: Tensor, v: Tensor, part: Batch, scale: float) -> tuple[Tensor, Tensor]:
        heads, _, dim = q.shape
        wrapper = _wrapper("VariableBlockSparseAttentionWrapper", q)
        sizes = (part.row_sizes.int(), part.key_sizes.int())
        with explained("FlashInfer", "triton"):
            wrapper.plan(part.cells, *sizes, heads, heads, dim, sm_scale=scale, q_data_type=q.dtype)
            # FlashInfer's query heads share the mask of their K/V head, ours do not: every head gets its own keys
            own = (t.flatten(0, 1).index_select(0, part.kv_heads) for t in (k, v))
            return wrapper.run(q, *own, return_lse=True)


def batches(route: Route, dim: int) -> Iterator[Batch]:
    """Splits the heads so that the token list and offsets of a plan fit; heads that keep nothing are left out."""
    batch, heads = route.cells.shape[:2]
    kv_count = route.kv.offsets.shape[1]
    rows, keys = route.query.order.shape[-1], route.kv.order.shape[-1]
    flat = torch.arange(batch * heads, device=route.cells.device)
    kv_heads = flat // heads * kv_count + flat % heads // (heads // max(1, kv_count))
    row_sizes = _with_rest(route.query.sizes, rows)
    key_sizes = _with_rest(route.kv.sizes, keys)[kv_heads]
    cells = torch.nn.functional.pad(route.cells.flatten(0, 1), (0, 1, 0, 1))
    kept = (cells * key_sizes[:, None]).sum(-1)  # [B * H, Cq + 1]
    for part in head_ranges(kept.sum(-1).tolist(), rows * dim):
        yield Batch(part, kv_heads[part], row_sizes[part], key_sizes[part], cells[part], kept[part])


def head_ranges(counts: list[int], row_values: int) -> list[slice]:
    """Ranges of heads whose token lists of `counts` indices fit one plan; heads without any are left out."""
    found: list[slice] = []
    start, total = 0, 0
    for head, count in enumerate(counts):
        if max(count, row_values) > INT32:
            raise BackendError(
                f"head {head} keeps {count} token indices and has {row_values} query values: FlashInfer "
                f"counts to {INT32}; use backend='triton'"
            )
        fits = count and total + count <= INDEX_LIMIT and (head + 1 - start) * row_values <= INT32
        if total and not fits:
            found.append(slice(start, head))
        if not total or not fits:
            start, total = head, 0
        total += count
    return [*found, slice(start, len(counts))] if total else found


def _with_rest(sizes: Tensor, tokens: int) -> Tensor:
    """Sizes of the groups and, last, of the tokens without a group.  # [B, H, C] -> [B * H, C + 1]"""
    return torch.cat([sizes, tokens - sizes.sum(-1, keepdim=True)], -1).flatten(0, 1)


def expand(part: Batch, keys: int, total: int) -> Tensor:
    """The group-major token numbers that every group of rows keeps, group after group.  # [total] int32"""
    starts = part.key_sizes.cumsum(-1) - part.key_sizes + part.kv_heads[:, None] * keys  # [heads, Ck + 1]
    head, _, group = part.cells.nonzero(as_tuple=True)
    lengths = part.key_sizes[head, group]
    first = starts[head, group] - (lengths.cumsum(0) - lengths)
    return (first.repeat_interleave(lengths, output_size=total) + torch.arange(total, device=first.device)).int()


def _running(sizes: Tensor) -> Tensor:
    """Running sums from 0: the form of FlashInfer's indptr.  # [n + 1] int32"""
    return torch.nn.functional.pad(sizes.flatten().cumsum(0), (1, 0)).int()


def _group_of_row(row_sizes: Tensor, rows: int) -> Tensor:
    """Group of each row of the group-major order.  # [heads, Cq + 1] -> [heads, rows]"""
    place = torch.arange(rows, device=row_sizes.device).expand(len(row_sizes), -1)
    return torch.searchsorted(row_sizes.cumsum(-1), place.contiguous(), right=True)


def _wrapper(name: str, q: Tensor) -> Any:
    """One wrapper per thread, device and kind of call; a plan is in its workspace until the run."""
    import flashinfer

    known = vars(_LOCAL).setdefault("wrappers", {})
    key = (name, q.device, q.dtype, q.shape[-1])  # FlashInfer chooses a kernel at the first plan
    if key not in known:
        if q.device not in known:
            known[q.device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        known[key] = getattr(flashinfer, name)(known[q.device])
    return known[key]
