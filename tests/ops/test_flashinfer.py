"""The FlashInfer adapter: its real plan and run code on CPU, with only the compiled module replaced."""

import contextlib
import math
import weakref
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from residua.errors import BackendError
from residua.ops import flashinfer as adapter
from residua.ops.backend import Backend, Demand
from residua.ops.reference import Reference
from residua.ops.triton import TritonBackend
from residua.types import Drift, Partition, Route, SummaryKeys

BASE = Backend()

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")

CUDA = torch.device("cuda")


class CompiledModule:
    """Stands for FlashInfer's compiled kernels: checks what reaches them, answers with plain torch."""

    def __init__(self, kind, *arguments):
        self.kind = kind
        self.planned = None

    def plan(self, *arguments):
        assert len(arguments) == (20 if self.kind == "fa2" else 16)
        qo, kv, lengths, rows, batch, q_heads, kv_heads, page, graph = arguments[3:12]
        assert all(t.device.type == "cpu" and t.dtype == torch.int32 for t in (qo, kv, lengths))
        assert qo.numel() == kv.numel() == batch + 1
        assert (qo.diff() >= 0).all()
        assert (kv.diff() >= 0).all()
        assert torch.equal(lengths, kv.diff())  # the planner counts no key that is not there
        assert rows == qo[-1]
        assert (q_heads, kv_heads, page, graph) == (1, 1, 1, False)
        self.planned = (qo, kv)
        return ["plan"]

    def paged_run(self, *arguments):
        info, q, k, v, qo, kv, indices, _, out, lse = arguments[2:12]
        assert info == ["plan"]
        assert torch.equal(qo, self.planned[0])
        assert torch.equal(kv, self.planned[1])
        assert indices.dtype == torch.int32
        (scale,) = {x for x in arguments[16:] if isinstance(x, float) and 0 < x < 1}
        for r in range(qo.numel() - 1):
            rows = slice(int(qo[r]), int(qo[r + 1]))
            keys = indices[int(kv[r]) : int(kv[r + 1])].long()
            if not len(keys):
                out[rows], lse[rows] = math.nan, math.nan  # the adapter must not rely on these
                continue
            logits = torch.einsum("qgd,nd->qgn", q[rows].float(), k[keys, 0, 0].float()) * scale
            out[rows] = torch.einsum("qgn,nd->qgd", logits.softmax(-1), v[keys, 0, 0].float()).to(out.dtype)
            lse[rows] = logits.logsumexp(-1) / math.log(2)


@contextlib.contextmanager
def on_cpu(kind):
    """FlashInfer without a GPU: no pinned memory, no synchronisation, no compiled module."""
    import flashinfer.prefill as prefill
    import flashinfer.sparse as sparse

    empty = torch.empty
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k)),
            (torch.cuda, "synchronize", lambda *a: None),
            (sparse, "get_batch_prefill_module", CompiledModule),
            (prefill, "get_batch_prefill_module", CompiledModule),
            (sparse, "determine_attention_backend", lambda *a, **k: kind),
            (prefill, "determine_attention_backend", lambda *a, **k: kind),
            (sparse, "device_support_pdl", lambda device: False),
            (prefill, "device_support_pdl", lambda device: False),
            (adapter, "WORKSPACE_BYTES", 1024),
            (TritonBackend, "gather_rows", lambda self, x, order: BASE.gather_rows(x, order)),
            (TritonBackend, "group_major", lambda self, x, kv, values=False: BASE.gather_rows(x, kv.order)),
            (TritonBackend, "attend", Reference.attend),
            (adapter.FlashInferBackend, "join_rows", join_rows),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.callback(vars(adapter._LOCAL).clear)
        yield


def join_rows(self, out, lse, other, other_lse, order):
    """What the kernel does; it must not read rows that have seen nothing."""
    index = order[..., None].expand_as(other)
    before, before_lse = out.gather(1, index).float(), lse.gather(1, order)
    both = torch.logaddexp(before_lse, other_lse)
    base = torch.where(both == -torch.inf, 0.0, both)
    seen = [
        torch.where((x == -torch.inf)[..., None], 0.0, y.float() * (x - base).exp()[..., None])
        for x, y in ((before_lse, before), (other_lse, other))
    ]
    out.scatter_(1, index, sum(seen).to(out.dtype))
    lse.scatter_(1, order, both)


def partition(batch, heads, tokens, groups, seed):
    """Ragged groups, the third one empty, some tokens in none."""
    draw = torch.rand(batch, heads, tokens, generator=torch.Generator().manual_seed(seed))
    labels = (draw.square() * (groups + 1)).long() - 1
    return Partition.from_labels(torch.where(labels == 2, 0, labels), groups)


def call(dtype, heads=4, kv_heads=2, queries=90, keys=70, dim=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, heads, queries, dim, generator=generator).to(dtype)
    k, v = (torch.randn(2, keys, kv_heads, dim, generator=generator).to(dtype).transpose(1, 2) for _ in range(2))
    cells = torch.rand(2, heads, 5, 7, generator=generator) < 0.4
    cells[:, :, 3] = False  # a query group that keeps nothing
    cells[1, 2] = False  # a head that keeps nothing
    return q, k, v, Route(partition(2, heads, queries, 5, 1), partition(2, kv_heads, keys, 7, 2), cells)


@pytest.mark.parametrize("kind", ["fa2", "fa3"])
@pytest.mark.parametrize("backend", [adapter.FlashInferBackend, adapter.FlashInferBlocks])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)])
def test_attention_equals_the_reference(kind, backend, heads, kv_heads):
    q, k, v, route = call(torch.float32, heads, kv_heads)
    wanted, wanted_lse = Reference().attend(q, k, v, route, 0.2)
    with on_cpu(kind):
        out, lse = backend().attend(q, k, v, route, 0.2)
    torch.testing.assert_close(out, wanted, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, atol=2e-6, rtol=1e-5)
    assert (lse == -torch.inf).any()


def test_16_bit_inputs_and_the_dtype_that_was_asked_for():
    q, k, v, route = call(torch.float16)
    with on_cpu("fa2"):
        out, lse = adapter.FlashInferBackend().attend(q, k, v, route, 0.2, None, torch.float32)
    wanted, _ = Reference().attend(q, k, v, route, 0.2, None, torch.float32)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out, wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("drifting", [False, True])
def test_extra_keys_are_merged_in(drifting):
    q, k, v, route = call(torch.float32)
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(2, 4, 5, 6, 64, generator=generator) for _ in range(2))
    weight = torch.randn(2, 4, 5, 6, generator=generator)
    weight[:, :, 3] = -torch.inf
    sizes = ((2, 2, 64, 3), (2, 4, 5, 3), (2, 4, 5, 3), (2, 4, 5, 3, 64))
    basis, origin, curve, slope = (torch.randn(size, generator=generator) / 8 for size in sizes)
    slope[:, :, 3] = torch.nan  # of a group whose keys are all off
    extra = SummaryKeys(keys, values, weight, Drift(basis, origin, curve.abs(), slope) if drifting else None)
    wanted, wanted_lse = Reference().attend(q, k, v, route, 0.2, extra)
    with on_cpu("fa2"):
        out, lse = adapter.FlashInferBackend().attend(q, k, v, route, 0.2, extra)
    torch.testing.assert_close(out, wanted, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, atol=3e-6, rtol=1e-5)


class Memory(TorchDispatchMode):
    """The most bytes that the tensors made inside have held at the same time."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.live:
                storage = x.untyped_storage()
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def test_memory(monkeypatch):
    """Copies of q, k and v, one output, and what FlashInfer returns for a few heads: the summary's output is
    merged where it lies."""
    q, k, v, route = call(torch.float16, 8, 8, 2000, 2000)
    monkeypatch.setattr(adapter, "INDEX_LIMIT", 4000)
    assert len(list(adapter.batches(route, 64))) >= 8
    size = q.numel() * q.element_size()

    def summary_alone(self, q, k, v, route, scale, summary, out_dtype):
        assert route.cells.shape[-1] == 0
        return torch.zeros(q.shape, dtype=out_dtype), torch.zeros(q.shape[:3])

    def run(self, q, k, v, part, scale):
        return torch.zeros_like(q), torch.zeros(q.shape[:2])

    monkeypatch.setattr(adapter.FlashInferBackend, "_run", run)
    keys = torch.zeros(2, 8, 5, 6, 64)
    with on_cpu("fa2"), mock.patch.object(TritonBackend, "attend", summary_alone), Memory() as memory:
        adapter.FlashInferBackend().attend(q, k, v, route, 0.2, SummaryKeys(keys, keys, keys[..., 0]))
    assert 4 * size < memory.peak < 6 * size


@pytest.mark.parametrize("backend", [adapter.FlashInferBackend, adapter.FlashInferBlocks])
def test_a_route_that_keeps_nothing_never_reaches_flashinfer(backend):
    q, k, v, route = call(torch.float32)
    empty = Route(route.query, route.kv, torch.zeros_like(route.cells))
    with on_cpu("fa2"), mock.patch.object(CompiledModule, "plan", side_effect=AssertionError):
        out, lse = backend().attend(q, k, v, empty, 0.2)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()


def test_heads_are_cut_so_that_the_token_list_stays_small(monkeypatch):
    q, k, v, route = call(torch.float32)
    whole = Reference().attend(q, k, v, route, 0.2)[0]
    monkeypatch.setattr(adapter, "INDEX_LIMIT", 150)
    assert len(list(adapter.batches(route, 64))) > 2
    with on_cpu("fa2"):
        out, _ = adapter.FlashInferBackend().attend(q, k, v, route, 0.2)
    torch.testing.assert_close(out, whole, atol=2e-6, rtol=1e-5)


def test_head_ranges():
    limit = adapter.INDEX_LIMIT
    assert adapter.head_ranges([], 1) == []
    assert adapter.head_ranges([0, 0], 1) == []
    assert adapter.head_ranges([1, 1, 0, 1], 1) == [slice(0, 2), slice(3, 4)]
    assert adapter.head_ranges([limit, 1, limit - 1], 1) == [slice(0, 1), slice(1, 3)]
    assert adapter.head_ranges([limit + 5, 1], 1) == [slice(0, 1), slice(1, 2)]
    assert adapter.head_ranges([1, 1, 1], 2**30) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    with pytest.raises(BackendError, match=r"2147483648 token indices .* use backend='triton'"):
        adapter.head_ranges([2**31], 1)


def test_what_flashinfer_reports_names_the_way_out():
    q, k, v, route = call(torch.float32)
    with (
        on_cpu("fa2"),
        mock.patch.object(CompiledModule, "plan", side_effect=RuntimeError("nvcc not found")),
        pytest.raises(BackendError, match=r"nvcc not found. Use backend='triton'"),
    ):
        adapter.FlashInferBackend().attend(q, k, v, route, 0.2)


@pytest.mark.parametrize(
    ("demand", "capability", "reason"),
    [
        (Demand(CUDA, torch.bfloat16, 128, 128), (9, 0), None),
        (Demand(CUDA, torch.float16, 64, 64), (8, 0), None),
        (Demand(CUDA, torch.bfloat16, 128, 128), (10, 0), "sm_100: takes sm_80 to sm_90"),
        (Demand(CUDA, torch.bfloat16, 128, 128), (7, 5), "sm_75"),
        (Demand(CUDA, torch.float32, 128, 128), (9, 0), "dtype torch.float32"),
        (Demand(CUDA, torch.bfloat16, 96, 96), (9, 0), "head_dim=96"),
        (Demand(CUDA, torch.bfloat16, 128, 64), (9, 0), "value head_dim=64"),
        (Demand(torch.device("cpu"), torch.bfloat16, 128, 128), (9, 0), "device cpu"),
    ],
)
def test_reasons(demand, capability, reason):
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(adapter, "_can_build", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability),
    ):
        found = adapter.FlashInferBackend().reasons(demand)
    assert not found if reason is None else any(reason in text for text in found)


def test_what_is_missing_is_said():
    with mock.patch.object(adapter, "version", lambda name: "0.6.9"):
        assert "0.7 or newer" in adapter.missing_flashinfer()
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        assert adapter.missing_flashinfer() == "no CUDA device"
    with mock.patch.object(adapter, "version", side_effect=adapter.PackageNotFoundError):
        assert "not installed" in adapter.missing_flashinfer()
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(adapter, "_can_build", lambda: True),
        mock.patch.dict("sys.modules", {"flashinfer": None}),
    ):
        assert "cannot be imported" in adapter.missing_flashinfer()


def test_without_a_compiler_it_is_not_chosen():
    """Its kernels are compiled on first use: a call would raise."""
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(adapter, "_can_build", lambda: False),
    ):
        assert "finds no nvcc" in adapter.missing_flashinfer()
