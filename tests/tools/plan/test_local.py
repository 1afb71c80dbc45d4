"""Config files of transformers: understood ones, and hostile ones."""

import dataclasses
import json
from pathlib import Path

import pytest

from residua.errors import InputError
from residua.tools.plan import MODELS, make_plan
from residua.tools.plan.config_file import MAX_BYTES
from residua.tools.plan.local import READERS, read_architecture

WAN = {
    "_class_name": "WanTransformer3DModel",
    "_diffusers_version": "0.35.0.dev0",
    "added_kv_proj_dim": None,
    "attention_head_dim": 128,
    "ffn_dim": 13824,
    "in_channels": 36,
    "num_attention_heads": 40,
    "num_layers": 40,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "text_dim": 4096,
}


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def test_a_file_and_its_folder_give_the_built_in_model(tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    folder.mkdir()
    file = write(folder, WAN)
    built_in = make_plan("wan2.2-i2v-a14b", "1280x720", 81, 50, 0.22)
    for path in (file, folder, tmp_path):
        plan = make_plan(str(path), "1280x720", 81, 50, 0.22)
        assert plan.dense_pflops == built_in.dense_pflops
        assert plan.model.name == "transformer"
        assert any("are assumed" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"_class_name": "HunyuanVideoTransformer3DModel"}, "hunyuanvideo"),
        (
            {"_class_name": "CosmosTransformer3DModel", "num_attention_heads": 40, "num_layers": 36, "in_channels": 18},
            "cosmos-predict2.5-14b",
        ),
        ({"_class_name": "Cosmos3OmniTransformer"}, "cosmos3-nano-16b"),
        ({"_class_name": "Kandinsky5Transformer3DModel", "model_dim": 1792, "ff_dim": 7168}, "kandinsky5-lite"),
        (
            {"_class_name": "Kandinsky6Transformer3DModel", "in_visual_dim": 16},  # blocks as those of the Pro
            "kandinsky5-pro",
        ),
        ({"_class_name": "ZImageTransformer2DModel"}, "z-image"),
        ({"_class_name": "AllegroTransformer3DModel"}, "allegro"),
        ({"_class_name": "EasyAnimateTransformer3DModel"}, "easyanimate-v5.1-12b"),
        ({"_class_name": "SD3Transformer2DModel", "num_layers": 38, "num_attention_heads": 38}, "sd3.5-large"),
    ],
)
def test_families_and_their_defaults(tmp_path: Path, config: dict, name: str) -> None:
    read = read_architecture(write(tmp_path, config))
    assert any("class's defaults" in note for note in read.notes)
    not_said = {"parameters": 0.0, "text_encoder": 0.0, "others": 0.0, "paper": None}
    assert read == dataclasses.replace(MODELS[name], name=read.name, notes=read.notes, **not_said)


def test_world_and_cogvideox(tmp_path: Path) -> None:
    small = {**WAN, "out_channels": 3, "in_channels": 30, "patch_size": [1, 4, 4], "num_attention_heads": 2}
    plan = make_plan(str(write(tmp_path, small)), "64x64", frames=32)
    assert plan.tokens == 8_192
    plan = make_plan(str(write(tmp_path, {"_class_name": "CogVideoXTransformer3DModel"})))
    assert (plan.tokens, plan.forward.queries) == (17_550, 17_550 + 226)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"_class_name": "UNet2DConditionModel"}, "WanTransformer3DModel"),
        ({"_class_name": None}, "no _class_name"),
        ({"_class_name": ["WanTransformer3DModel"]}, "_class_name"),
        ({"_class_name": "x" * 10_000}, "_class_name"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_layers": -3}, "num_layers=-3"),
        ({"num_layers": True}, "num_layers=True"),
        ({"num_layers": "40"}, "num_layers='40'"),
        ({"num_layers": 4e1}, "num_layers=40.0"),
        ({"num_layers": 10**30}, "a very large number"),
        ({"num_attention_heads": {"a": 1}}, "a dict of 1"),
        ({"patch_size": [1, 2]}, "three whole numbers"),
        ({"patch_size": [0, 2, 2]}, "patch_size=0"),
        ({"patch_size": 2}, "three whole numbers"),
        ({"out_channels": 7}, "out_channels=7"),
    ],
)
def test_values_that_make_no_sense_are_refused(tmp_path: Path, change: dict, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        make_plan(str(write(tmp_path, {**WAN, **change})))
    assert len(str(caught.value)) < 1500  # mostly the list of known classes


def test_heads_that_do_not_divide_and_odd_ratios(tmp_path: Path) -> None:
    cosmos3 = {"_class_name": "Cosmos3OmniTransformer", "num_attention_heads": 30, "num_key_value_heads": 8}
    with pytest.raises(InputError, match="no multiple"):
        read_architecture(write(tmp_path, cosmos3))
    for ratio in (0, -1, 1e9, "4", [4]):
        hunyuan = {"_class_name": "HunyuanVideoTransformer3DModel", "mlp_ratio": ratio}
        with pytest.raises(InputError, match="mlp_ratio"):
            read_architecture(write(tmp_path, hunyuan))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"_class_name": "WanTransformer3DModel", "num_la',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\x80\x04\x95pickle",
        b"\xff\xfe{\x00}\x00",
        b'{"num_layers": NaN}',
        b'{"num_layers": ' + b"9" * 10_000 + b"}",
        b'["WanTransformer3DModel"]',
        b"null",
    ],
    ids=["empty", "truncated", "nested", "nested-objects", "pickle", "utf-16", "nan", "digits", "list", "null"],
)
def test_hostile_files_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(InputError, match=r"config\.json"):
        make_plan(str(path))


def test_huge_files_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: takes no room, and would not fit into memory
    with pytest.raises(InputError, match=str(MAX_BYTES)):
        make_plan(str(path))


def test_places_without_a_config(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.json", Path("/dev/zero")):
        with pytest.raises(InputError):
            make_plan(str(path))


def test_every_reader_takes_an_empty_config(tmp_path: Path) -> None:
    for kind in READERS:
        plan = make_plan(str(write(tmp_path, {"_class_name": kind})))
        assert plan.dense_pflops > 0
