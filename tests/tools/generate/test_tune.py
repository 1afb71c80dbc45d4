"""`residua tune`: the search, the check on other clips, the profile, and how it ends without one."""

import math
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
from residua import Config, InputError, accelerate
from residua.hosts import QUALITIES, Profile, Settings
from residua.tools.generate import tune
from residua.tools.generate.averages import MeanRow
from residua.tools.generate.noise_floor import MEANING
from residua.tools.generate.run import generate
from residua.tools.generate.tune import Log, Target, Trial, Unreachable, densities, setting
from tests.support.command import run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TINY = ("--size", "16", "--frames", "8", "--steps", "2", "--min-tokens", "0")


def silent(name):
    return lambda done, total: None


@pytest.mark.parametrize("border", [0.01, 0.021, 0.05, 0.06, 0.09, 0.3, 0.59, 2.0])
def test_the_search_closes_in_on_the_border(border):
    tried = list(densities(20, lambda density: density >= border))
    assert len(tried) <= 9 and len(set(tried)) == len(tried)
    kept = [density for density in tried if density >= border]
    missed = [density for density in tried if density < border]
    if border < 0.02:
        assert tried[-1] == 0.02 and not missed
    elif border > 0.6:
        assert tried[-1] == 0.6 and not kept
    else:
        assert min(kept) / max(missed) < 1.12


def test_the_search_is_bounded():
    assert list(densities(3, lambda density: density >= 0.1)) == [0.06, 0.12, 0.0849]


def test_the_guard_follows_the_qualities():
    for quality in QUALITIES.values():
        found = setting(quality.density).config
        assert found.balance and found.density == quality.density
        assert math.isclose(found.max_error, quality.max_error, rel_tol=0.15)
    assert setting(0.5).config.max_error == 0.03 and setting(0.02).config.max_error == 0.4
    assert setting(0.1, Settings(dense_steps=2)).dense_steps == 2


def test_targets():
    assert Target("psnr", 30).kept_by(30) and not Target("psnr", 30).kept_by(29.9)
    assert Target("lpips", 0.1).kept_by(0.1) and not Target("error", 0.1).kept_by(0.2)
    assert Target("psnr", 30).worst([31, 40]) == 31 and Target("error", 0.1).worst([0.1, 0.4]) == 0.4
    for metric, value in (("psnr", 0), ("psnr", math.nan), ("lpips", 2), ("error", -1)):
        with pytest.raises(InputError, match=f"--target-{metric}"):
            Target(metric, value)


def trial(settings, worst, target, cost=None) -> Trial:
    cost = settings.config.density if cost is None else cost
    means = MeanRow("a setting", settings, psnr=worst, error=0.1, speedup=2.0)
    return Trial(means, worst, target.kept_by(worst), cost)


def search(monkeypatch, worst_at, target, noise_floor=None, tries=7):
    """Runs `tune` with measurements from a formula: `worst_at(where, density)`."""
    log = Log(lambda where, trial: None)
    clips = []

    def dense(pipe, model, requests, lpips, watch, *, noise_floor):
        clips.append(requests)
        return SimpleNamespace(requests=requests)

    def tried(clips, settings, target):
        return trial(settings, worst_at(clips.requests, settings.config.density), target)

    lowest = {} if noise_floor is None else {"psnr": noise_floor}
    monkeypatch.setattr(tune, "measure_dense", dense)
    monkeypatch.setattr(tune, "worst_noise_floor", lambda clips: lowest)
    monkeypatch.setattr(tune, "try_setting", tried)
    found = tune.tune(None, "m", ("a",), ("b",), target, Settings(), lpips="x", watch=silent, log=log, tries=tries)
    return found, log


def test_the_cheapest_setting_that_keeps_the_target_is_verified(monkeypatch):
    found, log = search(monkeypatch, lambda where, density: 1000 * density, Target("psnr", 50))
    assert [one.config.density for one in log.trials["tuning"]] == [0.06, 0.03, 0.0424, 0.0504, 0.0462]
    cheapest = min((one for one in log.trials["tuning"] if one.kept), key=lambda one: one.cost)
    assert found.chosen is cheapest and found.verified.settings is cheapest.settings
    assert len(log.trials["held out"]) == 1


def test_a_setting_that_fails_on_other_clips_makes_place_for_a_dearer_one(monkeypatch):
    def worst(where, density):
        return 1000 * density if where == ("a",) else 900 * density

    found, log = search(monkeypatch, worst, Target("psnr", 50))
    held_out = log.trials["held out"]
    assert [one.kept for one in held_out] == [False, True]
    assert found.verified is held_out[-1] and found.chosen.config == held_out[-1].config


def test_what_no_setting_keeps_is_said_with_the_best(monkeypatch):
    with pytest.raises(Unreachable, match=r"PSNR ≥ 90 dB is not reached by any of 5 settings; the best is 60"):
        search(monkeypatch, lambda where, density: 100 * density, Target("psnr", 90))
    with pytest.raises(Unreachable, match="more --tries"):
        search(monkeypatch, lambda where, density: 0.5 - density, Target("error", 0.01), tries=2)
    with pytest.raises(Unreachable, match=r"not on the held-out ones \(best there: 0.00 dB\)"):
        search(monkeypatch, lambda where, density: 99.0 if where == ("a",) else 0.0, Target("psnr", 50))


def test_a_target_above_the_floor_is_refused_before_anything_is_tried(monkeypatch):
    def never(where, density):
        raise AssertionError

    with pytest.raises(Unreachable, match=r"two dense runs of this model differ by 31.00 dB \(the noise floor\)"):
        search(monkeypatch, never, Target("psnr", 40), noise_floor=31.0)


def test_tune_writes_a_profile_that_accelerate_takes(weights, pipe, request_small, tmp_path):
    out = tmp_path / "p.toml"
    found = run("tune", "--model", weights, "--target-psnr", "20", "--tries", "3", "--out", out, *TINY)
    assert found.exit_code == 0, found.output
    for word in ("tuning", "held out", "floor", MEANING, "kept", "on the held-out ones"):
        assert word in " ".join(found.output.split())  # a long path makes lines break
    data = tomllib.loads(out.read_text(encoding="utf-8"))
    assert data["evidence"]["on_tuning"] >= 20 and data["evidence"]["on_held_out"] >= 20
    assert data["evidence"]["floor"]["psnr"] > 60 and data["evidence"]["seeds"] == [0]
    assert data["evidence"]["held_out_seeds"] == [1] and data["evidence"]["versions"]["torch"]
    assert not set(data["evidence"]["prompts"]) & set(data["evidence"]["held_out_prompts"])
    assert data["model"]["transformers"] == ["WanTransformer3DModel"] and data["model"]["head_dim"] == 32
    assert str(tmp_path) not in data["evidence"]["command"]
    with accelerate(pipe, profile=out) as handle:
        generate(pipe, request_small)
        report = handle.report()
    config = report.transformers[0].settings["config"]
    assert config == Profile.from_toml(out).config.to_dict() and report.total.sparse > 0
    assert report.total.dense_calls == 0 and config["balance"]


def test_tune_ends_with_one_line_and_no_file_if_the_target_is_out_of_reach(weights, tmp_path):
    out = tmp_path / "p.toml"
    asked = ("--target-error", "1e-9", "--tries", "2")
    found = run("tune", "--model", weights, *asked, "--out", out, *TINY)
    assert found.exit_code == 2 and "is not reached by any of 2 settings; the best is error" in found.output
    assert "missed" in found.output and not list(tmp_path.iterdir())
    assert "the noise floor: " in found.output  # a PSNR is shown, and so is its floor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "wanted one target"),
        (("--target-psnr", "30", "--target-error", "0.1"), "given: 2"),
        (("--target-psnr", "-3"), "wanted a number above 0"),
        (("--target-lpips", "0.1"), "no LPIPS weights"),
        (("--target-psnr", "30", "--out", "p.json"), "ends in .toml"),
        (("--target-psnr", "30", "--prompts", "nothing.txt"), "--prompts nothing.txt: cannot be read"),
        (("--target-psnr", "30", "--held-out", "empty.txt"), "--held-out empty.txt: empty"),
        (("--target-psnr", "30", "--seeds", "a"), "--seeds 'a'"),
        (("--target-psnr", "30", "--min-tokens", "4096"), "all dense: there is nothing to tune"),
    ],
)
def test_tune_refuses(weights, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    found = run("tune", "--model", weights, *TINY, *arguments)
    assert found.exit_code == 2 and message in " ".join(found.output.split()), found.output
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_accelerate_takes_a_profile_alone(pipe, tmp_path):
    from residua.hosts.diffusers import model_facts

    profile = Profile(Settings(Config(balance=True, density=0.1), min_tokens=0), model_facts(pipe))
    with pytest.raises(InputError, match="profile= together with density="):
        accelerate(pipe, 0.1, profile=profile)
    with pytest.raises(InputError, match="profile= together with quality= and config="):
        accelerate(pipe, quality="fast", config=Config(), profile=profile)
    for wrong in (True, 3):
        with pytest.raises(InputError, match="wanted the path of a file"):
            accelerate(pipe, profile=wrong)
    with pytest.raises(InputError, match="cannot be read"):
        accelerate(pipe, profile=tmp_path / "nothing.toml")
    with accelerate(pipe, profile=profile, dense_steps=1) as handle:
        settings = handle.attachments[0].host.settings
    assert (settings.dense_steps, settings.min_tokens) == (1, 0)
