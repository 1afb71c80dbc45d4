"""Profiles: what is written is read again, and nothing else is believed."""

import logging

import pytest

from residua import Config, InputError
from residua.hosts import ModelFacts, Profile, Settings

WAN = ModelFacts("wan", ("WanTransformer3DModel",), 40, 128)


def made(**run) -> Profile:
    config = Config(balance=True, density=0.05, max_error=0.24)
    evidence = {
        "prompts": ['a "cat" \\ walks', "zwei\nZeilen", "\x7f\t♥ 🎬"],
        "steps": None,
        "wanted": 30.0,
        "tried": [{"density": 0.05, "psnr": None, "kept": True}],
        "versions": {"torch 2": "2.13"},
        "gpus": [],
        "worst": float("inf"),
    }
    return Profile(Settings(config, min_tokens=0, **run), WAN, evidence)


def test_a_profile_reads_as_it_was_written(tmp_path):
    path = tmp_path / "wan.toml"
    path.write_text(made(dense_steps=0.1).to_toml(), encoding="utf-8")
    found = Profile.from_toml(path)
    assert (found.config, found.model) == (made().config, WAN)
    asked = found.settings
    assert (asked.dense_steps, asked.dense_layers, asked.min_tokens) == (0.1, None, 0)
    assert found.evidence["prompts"] == ['a "cat" \\ walks', "zwei\nZeilen", "\x7f\t♥ 🎬"]
    assert found.evidence["tried"] == [{"density": 0.05, "kept": True}] and "steps" not in found.evidence
    assert found.evidence["versions"] == {"torch 2": "2.13"} and found.evidence["worst"] == float("inf")
    assert Config.from_toml(path) == made().config  # a profile is a file of settings, too
    assert Profile.from_toml(tmp_path / "wan.toml").to_toml() == made(dense_steps=0.1).to_toml()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format = 1", "", "no `format`: not a profile"),
        ("format = 1", "format = 2", "format 2; residua .* reads 1: tune again"),
        ("[residua]", "[resida]", r"unknown `resida`; wanted .*did you mean 'residua'\?"),
        ("density = 0.05", "densty = 0.05", r"densty.*did you mean 'density'\?"),
        ("density = 0.05", "density = 5", "did you mean 0.05"),
        ("min_tokens = 0", "min_token = 0", r"unknown `run.min_token`.*did you mean 'min_tokens'\?"),
        ("head_dim = 128", 'head_dim = "128"', "model.head_dim='128': wanted int"),
        ("layers = 40", "", "no `layers` in \\[model\\]"),
        ('  "WanTransformer3DModel",', "  3,", "wanted class names"),
        ("[model]", "[[model]]", "`model` is list; wanted a table"),
        ("format = 1", "format = = 1", "not valid TOML"),
    ],
)
def test_a_file_that_is_not_a_profile_is_refused(tmp_path, old, new, message):
    path = tmp_path / "bad.toml"
    text = made().to_toml()
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        Profile.from_toml(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"nothing.toml: cannot be read"):
        Profile.from_toml(tmp_path / "nothing.toml")


def test_another_model_is_refused_and_another_size_warned_of(caplog):
    other = ModelFacts("hunyuan", ("HunyuanVideoTransformer3DModel",), 60, 128)
    with pytest.raises(InputError, match=r"p.toml was made for WanTransformer3DModel with 40.*residua tune"):
        made().check_model(other, "p.toml")
    with caplog.at_level(logging.WARNING, "residua.hosts"):
        made().check_model(WAN, "p.toml")
        assert not caplog.records
        made().check_model(ModelFacts("small", WAN.transformers, 40, 64), "p.toml")
        made().check_model(ModelFacts("short", WAN.transformers, 30, 128), "p.toml")
        made().check_model(ModelFacts("unknown dim", WAN.transformers, 40, None), "p.toml")
    assert len(caplog.records) == 2 and "head dim 64" in caplog.text and "30 attention layers" in caplog.text
