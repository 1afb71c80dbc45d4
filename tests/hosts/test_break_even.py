"""Which GPU a real one is taken for, and which calls are too short for it."""

import torch

from residua.hosts import settings
from residua.hosts.settings import MIN_TOKENS, min_tokens_for


def test_a_real_gpu_is_taken_for_one_of_the_table(monkeypatch):
    for name, capability, wanted in (
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "4090"),
        ("NVIDIA GeForce RTX 3090", (8, 6), "4090"),
        ("NVIDIA A30", (8, 0), "a100"),
        ("NVIDIA GB200", (10, 0), "b200"),
        ("something new", (13, 0), "h100"),
    ):
        assert settings.nearest_gpu(name, capability) == wanted
    monkeypatch.setattr(settings, "BREAK_EVEN", {"h100": 8192})
    assert settings.nearest_gpu("NVIDIA A30", (8, 0)) == "h100"


def test_short_calls_stay_dense_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    minimum = min_tokens_for(torch.device("cuda"))
    assert MIN_TOKENS < minimum == settings.BREAK_EVEN["h100"] <= 32768
    assert min_tokens_for(torch.device("cpu")) == MIN_TOKENS
