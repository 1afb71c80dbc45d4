"""Config: the paper's defaults, clear refusals, and loading from plain values and TOML."""

import dataclasses
import inspect
import math

import pytest

from residua import Config, InputError
from residua.method.reconstructions import RECONSTRUCTIONS


def test_the_papers_settings():
    config = Config.paper()
    assert (config.key_rank, config.query_rank, config.probes, config.residual_rank) == (48, 64, 64, 16)
    assert (config.ridge, config.density, config.metric_rows) == (0.1, 0.22, 2048)
    assert (config.kmeans_cold, config.kmeans_warm) == (25, 2)
    assert (config.partition, config.score, config.reconstruction) == ("response", "mass", "probe")
    assert config.subspace is True and config.check_finite is False
    assert (config.probe_policy, RECONSTRUCTIONS["probe"].probe_policy) == (None, "stratified")
    assert (config.backend, config.max_error, config.balance) == ("auto", None, False)
    assert config.query_groups is None and config.kv_groups is None


@pytest.mark.parametrize(
    "name, value",
    [
        *(("density", value) for value in (0, 0.0, -0.1, 1.0001, math.nan, math.inf, "0.2", None, True)),
        *(("ridge", value) for value in (-1e-9, math.nan, math.inf, "1", False)),
        *((name, bad) for name in ("key_rank", "query_rank", "metric_rows") for bad in (0, -1, 1.5, True)),
        *((name, 0) for name in ("kmeans_cold", "kmeans_warm", "residual_rank", "query_groups", "kv_groups")),
        ("kmeans_cold", 1001),
        ("kmeans_warm", 1001),
        ("probes", -1),
        ("probes", 2.0),
        ("query_groups", 3.0),
        ("kv_groups", "8"),
        ("partition", "spectral"),
        ("score", "max"),
        ("reconstruction", "affine"),
        ("probe_policy", "best"),
        ("partition", None),
        ("subspace", 1),
        ("check_finite", "yes"),
        ("backend", None),
    ],
)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=rf"Config\.{name}=.*wanted"):
        Config(**{name: value})


@pytest.mark.parametrize("density", [1, 1.0, 1e-9, 0.22])
def test_densities_up_to_one_are_taken(density):
    assert Config(density=density).density == density


def test_it_is_frozen_and_hashable():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.density = 0.5
    assert hash(config) == hash(Config()) and config == Config()


def test_round_trip_through_a_dict():
    config = Config(density=0.5, query_groups=7, partition="semantic", reconstruction="none", subspace=False)
    settings = config.to_dict()
    assert list(settings) == [field.name for field in dataclasses.fields(Config)]
    assert Config.from_dict(settings) == config


def test_unknown_names_are_refused_and_listed():
    with pytest.raises(InputError, match=r"densty.*Config has: density"):
        Config.from_dict({"densty": 0.3})
    with pytest.raises(InputError, match=r"densty.*did you mean 'density'\?"):
        Config(densty=0.3)
    assert list(inspect.signature(Config).parameters) == [field.name for field in dataclasses.fields(Config)]


def test_replace_validates_again():
    assert Config().replace(density=0.5).density == 0.5
    with pytest.raises(InputError, match="density"):
        Config().replace(density=2)


def test_toml_flat_and_in_a_table(tmp_path):
    flat, table = tmp_path / "flat.toml", tmp_path / "table.toml"
    flat.write_text('density = 0.26\npartition = "semantic"\n')
    table.write_text('[residua]\ndensity = 0.26\npartition = "semantic"\n[other]\nx = 1\n')
    assert Config.from_toml(flat) == Config.from_toml(str(table)) == Config(density=0.26, partition="semantic")


@pytest.mark.parametrize(
    "text", ["density = ", "density = nan", "densty = 0.2", "residua = 3", "density = '0.2'", "a = " + "[" * 5000]
)
def test_hostile_toml_is_refused(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(InputError):
        Config.from_toml(path)


def test_files_that_cannot_be_a_config_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"missing\.toml: cannot be read"):
        Config.from_toml(tmp_path / "missing.toml")
    with pytest.raises(InputError, match="cannot be read"):
        Config.from_toml(tmp_path)
    binary, bloated = tmp_path / "binary.toml", tmp_path / "bloated.toml"
    binary.write_bytes(b"\xff\xfe\x00density")
    bloated.write_text("#" * (2 << 20))
    with pytest.raises(InputError, match="not valid TOML"):
        Config.from_toml(binary)
    with pytest.raises(InputError, match="larger than"):
        Config.from_toml(bloated)


def test_a_percentage_is_recognised():
    with pytest.raises(InputError, match=r"Config\.density=22.*did you mean 0\.22\?"):
        Config(density=22)
    with pytest.raises(InputError, match=r"density=-1: (?!.*did you mean)"):
        Config(density=-1)


@pytest.mark.parametrize("dial", [{"max_error": 0.1}, {"balance": True}])
def test_an_estimate_that_reads_low_moves_no_budget(dial):
    with pytest.raises(InputError, match="2 to 4 times too low"):
        Config(probe_policy="stratified", **dial)
    assert Config(probe_policy="random", **dial).moves_budget


def test_what_is_never_skipped_takes_no_probes():
    assert Config(density=1.0).skips_nothing and not Config(density=1.0).takes_probes
    assert not Config(density=1.0, max_error=0.1).skips_nothing
    assert Config().takes_probes and Config.paper().takes_probes
    assert not Config(reconstruction="none").takes_probes
