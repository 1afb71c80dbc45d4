"""One warm call on tensors without memory: every operation of torch and every Triton launch, by stage."""

import importlib
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dev.gpu_model.fake_cuda import fake_cuda
from residua.config import Config
from residua.ops.triton import TritonBackend
from residua.state import State
from residua.util.stopwatch import Stopwatch

# operations that only change how memory is seen, or only reserve it
VIEWS = frozenset({
    "device", "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "slice", "select", "transpose",
    "permute", "t", "alias", "detach", "as_strided", "unfold", "diagonal", "split", "narrow",
    "_reshape_alias", "unbind", "split_with_sizes", "lift_fresh", "sym_size", "sym_stride", "sym_numel",
    "sym_storage_offset", "prim_device", "empty", "empty_like", "new_empty", "empty_strided",
    "new_empty_strided",
})  # fmt: skip
# kernels that one operation launches on CUDA, from ATen's sources; every other one launches one
KERNELS = {
    "sort": 13,
    "argsort": 13,
    "topk": 6,
    "cumsum": 2,
    "linalg_cholesky_ex": 3,
    "cholesky_solve": 3,
    "linalg_solve_triangular": 5,
    "scatter_reduce": 2,
    "_linalg_eigh": 20,
    "logsumexp": 5,
    "logcumsumexp": 2,
    "segment_reduce": 2,
}
# How often the operation's own kernels read and write its operands. Fewer than 128 rows are sorted together,
# with numbers of row and column in tow: 4 passes by value, one by row, and one that looks everything up.
PASSES = {"sort": 10, "argsort": 10, "topk": 2}
# operations that touch only the chosen part of their first operand
CHOOSING = frozenset({"gather", "index", "index_select", "take", "scatter_", "index_put_", "index_copy_"})
PRODUCTS = ("mm", "bmm", "baddbmm", "addmm")
# operations that wait for the device on CUDA: each reads a value to the host
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal", "is_nonzero"}
WAITS |= {"_linalg_eigh", "linalg_eigh", "_linalg_svd"}  # eigensolvers look at their error codes


@dataclass(frozen=True)
class Operation:
    """One operation of torch."""

    stage: str
    name: str
    kernels: int
    bytes: int
    flops: int
    dtype: str  # of its result


@dataclass(frozen=True)
class Shape:
    """A tensor as a kernel sees it, without the tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    storage: int = 0  # tells tensors apart that are given by two names

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    def meta(self) -> Tensor:
        """A tensor like it, without memory."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel."""

    stage: str
    kernel: Any  # the JIT function
    grid: int
    arguments: dict[str, Any]  # by name; tensors as their shapes
    options: dict[str, Any]  # num_warps, num_stages

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__).removesuffix("_kernel")

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


@dataclass
class Trace:
    operations: list[Operation] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    peak_bytes: int = 0  # beside q, k and v
    waits: list[str] = field(default_factory=list)  # operations that read from the device
    mixed: list[str] = field(default_factory=list)  # operations on tensors of two devices

    @property
    def kernels(self) -> int:
        return sum(op.kernels for op in self.operations) + len(self.launches)

    @property
    def stages(self) -> list[str]:
        found = [op.stage for op in self.operations] + [launch.stage for launch in self.launches]
        return list(dict.fromkeys(found))


class _Recorder(TorchDispatchMode):
    """Writes down what torch does, and how much memory lives at the same time."""

    def __init__(self, trace: Trace, stage: list[str], given: Sequence[Tensor]) -> None:
        super().__init__()
        self.trace, self.stage = trace, stage
        self.given = {x.untyped_storage()._cdata for x in given}  # they are the caller's
        self.live: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__.split(".")[-1]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in outputs:
            self._hold(x)
        if name in WAITS:
            self.trace.waits.append(name)
        # a number on the host may meet a tensor; anything larger would be copied
        devices = {x.device.type for x in (*inputs, *outputs) if x.ndim or x.device.type != "cpu"}
        if len(devices) > 1:
            self.trace.mixed.append(name)
        if name in VIEWS:
            return result
        if name in CHOOSING:
            part = outputs[0] if name in ("gather", "index", "index_select", "take") else inputs[-1]
            moved = 2 * _bytes(part) + sum(map(_bytes, inputs[1:]))
        else:
            moved = sum(map(_bytes, (*inputs, *outputs))) * PASSES.get(name, 1)
        flops = 0
        if name in PRODUCTS:
            left, right = inputs[-2:]
            flops = 2 * left.numel() * right.shape[-1]
        dtype = str(outputs[0].dtype).removeprefix("torch.") if outputs else ""
        kernels = KERNELS.get(name, 1)
        self.trace.operations.append(Operation(self.stage[-1], name, kernels, moved, flops, dtype))
        return result

    def _hold(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.live or key in self.given or x.device.type != "cuda":
            return
        self.live[key] = storage.nbytes()
        weakref.finalize(storage, self.live.pop, key, None)
        self.trace.peak_bytes = max(self.trace.peak_bytes, sum(self.live.values()))


def _bytes(x: Tensor) -> int:
    """What reading the tensor once moves: an expanded dimension is read once."""
    return x.element_size() * math.prod(size for size, step in zip(x.shape, x.stride(), strict=True) if step)


def _shape(x: Tensor) -> Shape:
    return Shape(tuple(x.shape), tuple(x.stride()), x.dtype, x.untyped_storage()._cdata)


@contextmanager
def _stages(stage: list[str]) -> Iterator[None]:
    """Takes down in which stage of the call we are."""

    @contextmanager
    def entered(self: Any, name: str) -> Iterator[None]:
        stage.append(name)
        try:
            yield
        finally:
            stage.pop()

    with mock.patch.object(Stopwatch, "stage", entered):
        yield


@contextmanager
def recorded_launches(trace: Trace, stage: list[str]) -> Iterator[None]:
    """Inside, a Triton launch is written down and nothing runs."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = [p.name for p in self.params]
        arguments = dict(zip(names, args, strict=False))
        arguments |= {name: value for name, value in options.items() if name in names}
        devices = {x.device.type for x in arguments.values() if isinstance(x, Tensor)}
        if len(devices) > 1:
            trace.mixed.append(self.fn.__name__)
        # the tensors themselves must not outlive the call, or its peak of memory would be another
        shapes = {name: _shape(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        rest = {name: value for name, value in options.items() if name not in names}
        trace.launches.append(Launch(stage[-1], self, math.prod(grid), shapes, rest))

    with mock.patch.object(JITFunction, "run", run):
        yield


def trace_call(
    config: Config,
    *,
    tokens: int,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    text: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    processors: int = 132,
    arch: int = 90,
    warm: bool = True,
    receipt: bool = False,
) -> Trace:
    """Runs a call of that shape through the Triton backend on fake CUDA tensors.

    Args:
        config: settings of the call.
        tokens: keys and queries, text included.
        heads: query heads.
        head_dim: channels of a head.
        kv_heads: key/value heads; None: as many as query heads.
        text: so many tokens at the end are pinned and exact, and a mask hides some padding.
        dtype: of q, k and v.
        processors: of the GPU that is imagined.
        arch: its architecture, as in sm_90.
        warm: trace the second call of a state, not the first.
        receipt: whether the receipt is asked for as well.
    """
    from residua.ops.triton.shapes import imagined_gpu

    module = importlib.import_module("residua.api")
    trace, stage = Trace(), ["other"]
    span = (tokens - text, tokens) if text else None
    with (
        fake_cuda(processors),
        mock.patch.object(module, "choose_backend", lambda *_: TritonBackend()),
        imagined_gpu(arch),
        _stages(stage),
        recorded_launches(trace, stage),
    ):
        q, k, v = (
            torch.empty(1, tokens, count, head_dim, dtype=dtype, device="cuda").transpose(1, 2)
            for count in (heads, kv_heads or heads, kv_heads or heads)
        )
        mask = torch.ones(1, tokens, dtype=torch.bool, device="cuda") if text else None
        options: dict[str, Any] = {"pinned_keys": span, "exact_queries": span, "key_mask": mask}
        state = State()
        if warm:
            module.attention(q, k, v, config, state, **options)
            trace.launches.clear()
            trace.mixed.clear()
        with _Recorder(trace, stage, (q, k, v)):
            module.attention(q, k, v, config, state, return_receipt=receipt, **options)
    return trace
