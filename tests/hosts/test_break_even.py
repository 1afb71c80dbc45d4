"""The stored estimates: complete, and sensible between their points."""

from __future__ import annotations

import pytest
import torch

from residua.errors import InputError
from residua.hosts import break_even as stored
from residua.hosts.gpus import H100
from residua.hosts.settings import MIN_TOKENS, min_tokens_for


def rows(gpu="h100"):
    return [row for row in stored._table()["calls"] if row["gpu"] == gpu]


def test_the_table_holds_a_grid():
    for gpu in stored.stored_gpus():
        places = {(row["tokens"], row["density"]) for row in rows(gpu)}
        tokens, densities = {t for t, _ in places}, {d for _, d in places}
        assert len(places) == len(rows(gpu)) == len(tokens) * len(densities) >= 4


def test_points_of_the_table_come_back():
    for row in rows():
        found = stored.stored_estimate("h100", row["tokens"], 40, row["density"])
        wanted = row["call_ms"] + 40 * row["call_ms_per_head"]
        assert found.ms == pytest.approx(max(wanted, row["host_ms"]))
        assert found.launches == row["launches"]
        assert found.grouping_ms + found.attention_ms < wanted
        assert found.dense_ms == pytest.approx(4 * row["tokens"] ** 2 * 128 * 40 / 1e9 / H100.dense)


def test_more_tokens_pairs_or_heads_take_longer():
    def ms(tokens=40000, heads=24, density=0.15):
        return stored.stored_estimate("H100", tokens, heads, density).ms

    assert ms() < ms(tokens=50000) < ms(tokens=120000)
    assert ms() < ms(density=0.2)
    assert ms() < ms(heads=40)


def test_unknown_gpus():
    with pytest.raises(InputError, match="wanted one of"):
        stored.stored_estimate("voodoo2", 8192, 8, 0.2)


def test_a_real_gpu_is_taken_for_one_of_the_table(monkeypatch):
    known = ["h100", "a100", "4090", "5090", "b200"]
    monkeypatch.setattr(stored, "stored_gpus", lambda: known)
    for name, capability, wanted in (
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "4090"),
        ("NVIDIA GeForce RTX 3090", (8, 6), "4090"),
        ("NVIDIA A30", (8, 0), "a100"),
        ("NVIDIA GB200", (10, 0), "b200"),
        ("something new", (13, 0), "h100"),
    ):
        assert stored.nearest_gpu(name, capability) == wanted
    monkeypatch.setattr(stored, "stored_gpus", lambda: ["h100"])
    assert stored.nearest_gpu("NVIDIA A30", (8, 0)) == "h100"


def test_short_calls_stay_dense_on_a_gpu(monkeypatch):
    """From `break_even` tokens on a call takes no longer than a dense one, below it does."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    least = min_tokens_for(torch.device("cuda"))
    assert MIN_TOKENS < least <= 32768
    for tokens, saves in ((least, True), (least - stored.STEP, False)):
        found = stored.stored_estimate("h100", tokens, stored.TYPICAL_HEADS, stored.TYPICAL_DENSITY)
        assert (found.ms <= found.dense_ms) == saves
    assert min_tokens_for(torch.device("cpu")) == MIN_TOKENS
