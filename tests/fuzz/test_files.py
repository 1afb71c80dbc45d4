"""Files of strangers, damaged at random: they are read, or refused in one line with an InputError."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from residua import Config
from residua.hosts.profile import Profile
from residua.tools.capture.captures import read_captures
from residua.tools.plan.local import read_architecture
from tests.support.damage import damage_of, damaged_bytes, damaged_fields, json_bytes, refused, toml_bytes

ROUNDS = 250
SETTINGS = {"density": 0.2, "probes": 8, "reconstruction": "anchored", "balance": False, "kv_groups": 20}
PROFILE: dict[str, Any] = {
    "format": 1,
    "residua": SETTINGS,
    "run": {"dense_steps": 2, "dense_layers": 0.1, "min_tokens": 100},
    "model": {"name": "m", "transformers": ["WanTransformer3DModel"], "layers": 30, "head_dim": 128},
    "evidence": {"tried": [{"density": 0.2, "psnr": 30.5}], "prompts": ["a cat"]},
}
WAN = {
    "_class_name": "WanTransformer3DModel",
    "num_layers": 30,
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "patch_size": [1, 2, 2],
    "in_channels": 16,
    "text_dim": 4096,
}


def sparse_run(found: Profile) -> None:
    """What a profile promises to `accelerate`."""
    for value in (found.settings.dense_steps, found.settings.dense_layers, found.settings.min_tokens):
        assert value is None or (isinstance(value, (int, float)) and value >= 0), found


@pytest.mark.parametrize(
    "values, write, read, check",
    [
        (SETTINGS, toml_bytes, Config.from_toml, lambda found: found.replace()),
        ({"residua": SETTINGS}, toml_bytes, Config.from_toml, lambda found: found.replace()),
        (PROFILE, toml_bytes, Profile.from_toml, sparse_run),
        (WAN, json_bytes, read_architecture, lambda found: None),
    ],
    ids=["settings", "settings in a table", "profile", "architecture"],
)
def test_settings(values, write, read, check, tmp_path):
    path = tmp_path / ("config.json" if write is json_bytes else "config.toml")
    path.write_bytes(write(values))
    assert not refused(-1, lambda: read(path), check)
    count = 0
    for seed in range(ROUNDS):
        path.write_bytes(damage_of(seed, values, write))
        count += refused(seed, lambda: read(path), check)
    assert count > ROUNDS // 3


@pytest.fixture
def captures(tmp_path) -> tuple[Path, dict[str, Any]]:
    """A folder of two calls, beside a sound file that is none of its business."""
    folder = tmp_path / "captures"
    folder.mkdir()
    q, k, v = torch.randn(3, 14, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    tensors = {"q": q.contiguous(), "k": k.contiguous(), "v": v.contiguous()}
    save_file(tensors, tmp_path / "outside.safetensors")
    calls = []
    for head in range(2):
        name = f"m_L0_H{head}.safetensors"
        save_file(tensors, folder / name, metadata={"grid": "3x2x2", "scale": "0.5"})
        calls.append(
            {
                "file": name,
                "layer": 0,
                "head": head,
                "step": 3,
                "branch": "cond",
                "grid": [3, 2, 2],
                "scale": 0.5,
                "text": [[0, 2]],
                "text_queries": [[0, 2]],
            }
        )
    manifest = {"format": "residua capture", "version": 1, "model": "m", "calls": calls}
    return folder, manifest


def sound(folder: Path) -> Callable[[Any], None]:
    def check(found: Any) -> None:
        for one in found:
            assert one.path.resolve().parent == folder.resolve()
            assert one.call().q.shape[-2] == one.tokens

    return check


def test_manifests_of_captures(captures):
    folder, manifest = captures
    path = folder / "manifest.json"
    path.write_bytes(json_bytes(manifest))
    assert not refused(-1, lambda: read_captures(folder), sound(folder))
    count = 0
    for seed in range(ROUNDS):
        path.write_bytes(damage_of(seed, manifest, json_bytes))
        count += refused(seed, lambda: read_captures(folder), sound(folder))
    assert count > ROUNDS // 3


def test_tensors_of_captures(captures):
    """The files themselves, with and without a manifest."""
    folder, manifest = captures
    path = folder / "m_L0_H0.safetensors"
    whole = path.read_bytes()
    count = 0
    for seed in range(ROUNDS):
        r = random.Random(seed)
        (folder / "manifest.json").unlink(missing_ok=True)
        if seed % 2:
            (folder / "manifest.json").write_bytes(json_bytes(manifest))
        path.write_bytes(with_other_header(r, whole) if r.random() < 0.5 else damaged_bytes(r, whole))
        count += refused(seed, lambda: read_captures(folder), lambda found: [one.load() for one in found])
    assert count > ROUNDS // 3


def with_other_header(r: random.Random, whole: bytes) -> bytes:
    """The same tensors behind a header whose fields are damaged."""
    size = int.from_bytes(whole[:8], "little")
    header = json_bytes(damaged_fields(r, json.loads(whole[8 : 8 + size])))
    return len(header).to_bytes(8, "little") + header + whole[8 + size :]
