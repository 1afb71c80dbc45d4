"""O1-O3 against direct computations that hold all of A."""

from types import SimpleNamespace

import pytest
import torch

from residua import Config
from residua.tools.capture import CaptureWriter, read_captures
from residua.tools.reports.page import Finding
from residua.tools.studies import subject
from residua.tools.studies.diagnostics import (
    Affine,
    Fidelity,
    Observed,
    _affine_findings,
    affine,
    fidelity,
    fidelity_table,
    identity_gap,
    row_support,
    sample_members,
    support,
)
from residua.tools.studies.study import weighed
from residua.tools.studies.subject import Subject, dense_rows
from residua.tools.synthetic import VideoLike, video_like

CONFIG = Config.paper(query_groups=6, kv_groups=10, density=0.3, probes=8, backend="torch")


@pytest.fixture(scope="module", params=[None, ((256, 270),)], ids=["video", "text"])
def case(request, tmp_path_factory):
    """A call and all of A, in fp64. With text, the last 14 tokens are pinned and exact."""
    tokens = 270 if request.param else 256
    q, k, v = video_like(VideoLike(grid=(tokens // 2, 1, 2), heads=1, head_dim=32))
    folder = tmp_path_factory.mktemp("capture")
    CaptureWriter(folder, "synthetic").add(
        q[0, 0], k[0, 0], v[0, 0], layer=0, head=0, scale=0.2, text=request.param, text_queries=request.param
    )
    made = Subject(read_captures(folder)[0], CONFIG)
    a = (0.2 * made.call.q[0, 0].double() @ made.call.k[0, 0].double().mT).softmax(-1)
    return made, a


def kept_mask(sparse) -> torch.Tensor:
    """Which keys each row keeps, by looking every pair up.  # [Nq, Nk]"""
    rows, keys = sparse.grouping.query.labels[0, 0].tolist(), sparse.grouping.kv.labels[0, 0].tolist()
    cells = sparse.route.cells[0, 0]
    return torch.tensor([[bool(r >= 0 and cells[r, c]) for c in keys] for r in rows])


def test_dense_rows_in_blocks_are_dense_attention(case, monkeypatch):
    made, a = case
    monkeypatch.setattr(subject, "CHUNK_PAIRS", 1000)  # three rows at a time
    out, lse = dense_rows(made.call)
    assert torch.allclose(out[0, 0].double(), a @ made.call.v[0, 0].double(), atol=1e-5)
    scores = 0.2 * made.call.q[0, 0].double() @ made.call.k[0, 0].double().mT
    assert torch.allclose(lse[0, 0].double(), scores.logsumexp(-1), atol=1e-5)


def test_row_support_by_hand():
    weights = torch.tensor(
        [[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25], [0.9, 0.1, 0.0, 0.0]], dtype=torch.float64
    )
    assert row_support(weights, 0.9).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize("partition", ["semantic", "response"])
def test_support_is_counted_key_by_key(case, partition):
    made, a = case
    found = support(made, partition, mass=0.9, members=4, max_groups=5)
    labels = made.group(CONFIG.replace(partition=partition)).query
    rows = sample_members(labels, 4, 5)
    assert 0 < len(rows) <= 5 and len(rows.unique()) == rows.numel()
    taus = []
    for group, pooled in zip(rows.tolist(), found.pooled.tolist(), strict=True):
        assert len(set(labels.labels[0, 0, group].tolist())) == 1
        union: set[int] = set()
        for row in group:
            heaviest, held, mass = a[row].argsort(descending=True).tolist(), set(), 0.0
            while mass < 0.9:
                held.add(heaviest[len(held)])
                mass = float(a[row, list(held)].sum())
            taus.append(len(held) / len(a))
            union |= held
        assert pooled == pytest.approx(len(union) / len(a), abs=1.5 / len(a))
    assert found.rows.tolist() == pytest.approx(taus, abs=1.5 / len(a))
    assert found.pooled_median >= found.row_median


@pytest.mark.parametrize("partition", ["semantic", "response"])
def test_kept_mass_error_and_identity(case, partition):
    made, a = case
    found = fidelity(made, partition, 0.3)
    sparse = made.sparse(CONFIG.replace(partition=partition, density=0.3))
    kept, v = kept_mask(sparse), made.call.v[0, 0].double()
    free = made.rows
    mass = torch.where(kept, a, 0.0).sum(-1)
    assert found.retained == pytest.approx(float(mass[free].mean()), abs=1e-5)
    out = torch.where(kept, a, 0.0) @ v / mass[:, None]
    errors = ((out - a @ v).norm(dim=-1) / (a @ v).norm(dim=-1))[free]
    assert found.mean == pytest.approx(float(errors.mean()), abs=1e-5)
    assert found.p99 == pytest.approx(float(errors.sort().values[-(-99 * len(errors) // 100) - 1]), abs=1e-5)
    assert found.density == pytest.approx(float(kept[free].double().sum() / a.numel()), abs=1e-6)
    skipped = torch.where(kept, 0.0, a)
    p_u = skipped.sum(-1, keepdim=True)
    residual = p_u * (skipped @ v / p_u.clamp(min=1e-300) - out)
    assert torch.allclose(residual[free], (a @ v - out)[free], atol=1e-12)
    assert found.identity < 1e-4


def test_the_identity_check_notices_a_wrong_output(case):
    made, _ = case
    sparse = made.sparse(CONFIG)
    sparse.out.mul_(1.01)
    try:
        assert identity_gap(made, sparse) > 1e-3
    finally:
        sparse.out.div_(1.01)


@pytest.mark.parametrize("partition", ["semantic", "response"])
def test_affine_energies_are_those_of_least_squares(case, partition):
    made, a = case
    found = affine(made, partition)
    sparse = made.sparse(CONFIG.replace(partition=partition))
    kept, v, free = kept_mask(sparse), made.call.v[0, 0].double(), made.rows
    out = (torch.where(kept, a, 0.0) @ v / torch.where(kept, a, 0.0).sum(-1, keepdim=True))[free]
    residual = (a @ v)[free] - out
    features = torch.cat([torch.ones(len(out), 1).double(), out], 1)
    left = residual - features @ torch.linalg.lstsq(features, residual).solution
    assert found.energy == pytest.approx(float(residual.square().sum()), rel=1e-3)
    assert found.orthogonal == pytest.approx(float(left.square().sum()), rel=1e-3)
    assert 0 < found.explained < 1


def observed(model: str, *pairs: tuple[float, float]) -> list[Observed]:
    """Calls whose affine residual explains these shares with semantic and with response-coupled groups."""
    return [
        Observed(
            SimpleNamespace(model=model),
            {},
            [],
            {"semantic": Affine("semantic", 0.2, 1.0, 1 - before), "response": Affine("response", 0.2, 1.0, 1 - after)},
        )
        for before, after in pairs
    ]


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ([(0.5, 0.6), (0.5, 0.55), (0.5, 0.49)], "confirmed"),
        ([(0.5, 0.4), (0.5, 0.45), (0.5, 0.51)], "contradicted"),
        ([(0.5, 0.5004), (0.5, 0.4999), (0.5, 0.4999), (0.5, 0.4999)], "no clear difference"),  # no margin
        ([(0.5, 0.8), (0.5, 0.49), (0.5, 0.49), (0.5, 0.49)], "no clear difference"),  # and no majority
    ],
)
def test_o3_needs_a_margin_and_a_majority(pairs, verdict):
    assert _affine_findings(observed("m", *pairs))[0].verdict == verdict


def test_o3_is_mixed_where_models_disagree():
    found = [*observed("a", (0.5, 0.6)), *observed("b", (0.5, 0.4))]
    assert [item.verdict for item in _affine_findings(found)] == ["mixed", "mixed"]


def test_o2_has_a_row_for_every_target():
    ones = [Fidelity("semantic", target, 0.2, 0.9, 0.1, 0.2, 1e-6) for target in (0.22, 0.24)]
    table = fidelity_table([Observed(SimpleNamespace(model="m"), {}, ones, {})])
    assert [row[:3] for row in table.rows] == [
        ("m, semantic groups", "22 %", "20.0 %"),
        ("m, semantic groups", "24 %", "20.0 %"),
    ]


def test_short_calls_give_no_verdict():
    findings = [Finding("a", True, "e"), Finding("b", False, "e", any_length=True)]
    short, long = ([SimpleNamespace(tokens=tokens)] for tokens in (4095, 4096))
    assert [item.verdict for item in weighed(findings, short)] == ["too short to tell", "contradicted"]
    assert "4,095 tokens" in weighed(findings, short)[0].evidence
    assert weighed(findings, long) == findings
