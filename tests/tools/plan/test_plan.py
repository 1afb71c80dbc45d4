"""Tokens, FLOPs, times and the verdict of plans."""

import json
import math
from types import SimpleNamespace

import pytest

from residua import Config
from residua.errors import InputError
from residua.method.rules import CPU, GPU
from residua.method.sizes import default_groups, summary_groups
from residua.tools.plan import MACHINES, MODELS, Plan, calls, make_plan
from residua.tools.plan.local import READERS
from residua.tools.plan.memory import OFFLOADS, matrix_parameters
from residua.tools.plan.models import ALIASES

PAPER = ("hunyuanvideo", "wan2.2-i2v-a14b", "cosmos-predict2.5-14b", "cosmos3-nano-16b")


def paper_plan(name: str, gpu: str = "h100") -> Plan:
    row = MODELS[name].paper
    assert row is not None
    return make_plan(name, row.size, row.frames, row.steps, row.density, gpu, paper=True)


@pytest.mark.parametrize(
    ("name", "tokens", "keys"),
    [
        ("hunyuanvideo", 118_800, 118_800 + 256),
        ("wan2.2-i2v-a14b", 75_600, 75_600),
        ("cosmos-predict2.5-14b", 84_480, 84_480),
        ("cosmos3-nano-16b", 44_160, 44_160 + 512),
        ("world", 8_192, 8_192),
    ],
)
def test_tokens_are_exact(name: str, tokens: int, keys: int) -> None:
    plan = make_plan(name)
    assert plan.tokens == tokens
    assert plan.forward.keys == keys
    groups = summary_groups(tokens, tokens, 0.06, CPU if plan.machine.value_bytes == 4 else GPU)
    assert (plan.call.query_groups, plan.call.kv_groups) == groups
    paper = make_plan(name, paper=True)
    assert (paper.call.query_groups, paper.call.kv_groups) == default_groups(tokens, tokens)


@pytest.mark.parametrize("name", PAPER)
def test_dense_flops_of_the_paper(name: str) -> None:
    row = MODELS[name].paper
    assert row is not None
    plan = paper_plan(name)
    assert plan.dense_pflops == pytest.approx(row.dense_pflops, rel=0.03)
    assert plan.paper is not None
    assert plan.paper["dense_deviation"] == pytest.approx(plan.dense_pflops / row.dense_pflops - 1)


def test_dense_flops_by_hand() -> None:
    # Wan2.2: 4 N^2 d for attention; 12 d^2 for projections of self- and cross-attention, 4 d f for the rest
    n, d, f, text = 75_600, 5_120, 13_824, 512
    attention = 4 * n * n * d
    rest = n * (12 * d * d + 4 * d * f) + 4 * n * text * d + 4 * text * d * d
    ends = 2 * n * 4 * (36 + 16) * d
    plan = make_plan("wan2.2-i2v-a14b", steps=50)
    assert plan.dense_pflops == pytest.approx(100 * (40 * (attention + rest) + ends) / 1e15, rel=1e-12)
    assert plan.attention_pflops == pytest.approx(100 * 40 * attention / 1e15, rel=1e-12)


def test_sparse_flops_are_those_of_the_schedule() -> None:
    plan = paper_plan("cosmos-predict2.5-14b")
    dense_share = 2 / 35 + 33 / 35 * 1 / 36
    evaluated = dense_share + (1 - dense_share) * 0.2214
    assert plan.evaluated == pytest.approx(evaluated)
    assert plan.sparse_pflops == pytest.approx(plan.rest_pflops + evaluated * plan.attention_pflops)
    assert (plan.schedule.dense_steps, plan.schedule.dense_layers) == (2, 1)
    assert plan.schedule.calls == 35 * 2 * 36


@pytest.mark.parametrize(
    ("name", "off"),  # how far our schedule is from the paper's sparse FLOPs; docs/plan.md says why
    [
        ("hunyuanvideo", -0.053),
        ("wan2.2-i2v-a14b", 0.140),
        ("cosmos-predict2.5-14b", 0.041),
        ("cosmos3-nano-16b", 0.173),
    ],
)
def test_deviation_of_sparse_flops_is_the_documented_one(name: str, off: float) -> None:
    paper = paper_plan(name).paper
    assert paper is not None
    assert paper["sparse_deviation"] == pytest.approx(off, abs=1e-3)


def test_the_papers_cosmos3_row_saves_more_than_its_density_allows() -> None:
    row = MODELS["cosmos3-nano-16b"].paper
    assert row is not None
    most = (1 - row.density) * paper_plan("cosmos3-nano-16b").attention_pflops
    assert row.dense_pflops - row.sparse_pflops > most


def test_times_of_the_paper() -> None:
    wan = paper_plan("wan2.2-i2v-a14b")
    assert wan.seconds.dense == pytest.approx(1650, rel=0.01)
    assert wan.seconds.sparse == pytest.approx(917, rel=0.01)
    # rates were solved from Wan2.2 alone; these are predictions
    assert paper_plan("hunyuanvideo").speedup == pytest.approx(2.61, rel=0.05)
    assert paper_plan("cosmos-predict2.5-14b").speedup_fast == pytest.approx(1.51, rel=0.05)
    assert paper_plan("cosmos3-nano-16b").speedup_fast == pytest.approx(1.48, rel=0.10)


@pytest.mark.parametrize("gpu", ["h100", "4090", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_parts_add_up(name: str, gpu: str) -> None:
    plan = make_plan(name, gpu=gpu, offload="model")
    seconds = plan.seconds
    beside = seconds.rest + seconds.transfer
    assert seconds.dense == pytest.approx(beside + seconds.dense_attention)
    assert seconds.sparse == pytest.approx(beside + seconds.dense_calls + seconds.sparse_cells + seconds.overhead)
    assert 0 < plan.evaluated <= 1
    assert plan.rest_pflops < plan.sparse_pflops <= plan.dense_pflops
    assert plan.overhead_pflops < 0.05 * plan.dense_pflops
    assert plan.worth_it == (plan.speedup >= 1.05)


def test_less_density_costs_less() -> None:
    speedups = [make_plan("wan2.2-i2v-a14b", density=density).speedup for density in (0.1, 0.22, 0.5, 0.9)]
    assert speedups == sorted(speedups, reverse=True)


def test_json_has_the_promised_keys() -> None:
    facts = json.loads(json.dumps(make_plan("wan2.2-i2v-a14b").to_dict(), allow_nan=False))
    promised = {"tokens", "dense_pflops", "sparse_pflops", "attention_speedup", "speedup"}
    further = {"groups", "attention_pflops", "rest_pflops", "memory_bytes", "seconds", "worth_it", "verdict"}
    assert promised | further | {"assumptions", "notes", "paper"} <= facts.keys()
    assert facts["tokens"] == 75_600
    assert facts["paper"] is None  # 40 steps are the release's default, not the paper's setting
    assert facts["groups"] == {"query": 567, "kv": 995}
    assert (facts["density"], facts["max_error"], facts["calls"]["dense_calls"]) == (0.06, 0.2, 0)
    assert 'quality "balanced"' in facts["method"] and facts["fits"] is False
    assert facts["assumptions"]


def test_memory_of_the_method() -> None:
    plan = make_plan("wan2.2-i2v-a14b", paper=True)
    tensor = 2 * 40 * 75_600 * 128  # q in bf16
    assert 5 * tensor < plan.memory.call < 10 * tensor
    # both transformers keep centroids for 38 layers in 2 branches
    assert plan.memory.state == 2 * 38 * 2 * (300 + 995) * 40 * 128 * 2


def test_it_plans_what_accelerate_does() -> None:
    from residua.hosts import QUALITIES, Settings
    from residua.hosts.settings import Preset

    preset = Preset(0.22, 0.2, 0.03, "any")
    for quality in (None, *QUALITIES):
        plan, settings = make_plan("wan2.2", quality=quality), Settings(quality=quality).resolve(preset)
        assert plan.config == settings.config
        assert (plan.schedule.dense_steps, plan.schedule.dense_layers) == (0, 0)
        assert (settings.dense_steps, settings.dense_layers) == (0, 0)
        assert f'quality="{quality or "balanced"}"' in plan.method and plan.paper is None
    assert make_plan("wan2.2", density=0.1).config == Settings(density=0.1).resolve(preset).config
    paper, settings = (make_plan("wan2.2", paper=True), Settings(Config.paper(density=0.22)).resolve(preset))
    assert paper.config == settings.config and "paper" in paper.method
    assert (paper.schedule.dense_steps, paper.schedule.dense_layers) == (8, 2)
    for more in ({"paper": True}, {"density": 0.1}):
        with pytest.raises(InputError, match="together with"):
            make_plan("wan2.2", quality="fast", **more)
    with pytest.raises(InputError, match="wanted one of 'faithful'"):
        make_plan("wan2.2", quality="best")


def test_what_fits_follows_the_offload() -> None:
    plans = {how: make_plan("wan2.2", gpu="rtx4090", offload=how) for how in OFFLOADS}
    peaks = [plan.memory.peak for plan in plans.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert plans["none"].memory.weights == round(1e9 * (2 * 14.29 + 5.68 + 0.13) * 2)
    assert plans["model"].memory.weights == round(1e9 * 14.29 * 2)
    assert [plan.memory.fits for plan in plans.values()] == [False, False, True]
    assert plans["none"].memory.verdict.endswith("--offload sequential")
    assert plans["none"].seconds.transfer == 0 < plans["model"].seconds.transfer
    # every pass of sequential offloading brings the weights of one transformer
    moved = 1e9 * (80 * 14.29 + 5.68 + 0.13) * 2
    assert plans["sequential"].seconds.transfer == pytest.approx(moved / (1e9 * 20))
    assert plans["sequential"].speedup < plans["none"].speedup
    assert make_plan("wan2.1-t2v-1.3b", gpu="4090").memory.fits is True
    assert make_plan("world", gpu="cpu").memory.fits is None
    hopeless = make_plan("flux.2", "8192x8192", gpu="3090", offload="sequential").memory
    assert hopeless.fits is False and "a GPU with more memory" in hopeless.verdict
    with pytest.raises(InputError, match=r"offload='sequental'.*did you mean 'sequential'\?"):
        make_plan("wan2.2", offload="sequental")


def test_stored_estimates_are_used_where_there_are_some(monkeypatch) -> None:
    asked = []

    def stored_estimate(*call):
        asked.append(call)
        return SimpleNamespace(ms=30.0, attention_ms=20.0, peak_gib=2.0)

    monkeypatch.setattr(calls, "stored_gpus", lambda: ["h100"])
    monkeypatch.setattr(calls, "stored_estimate", stored_estimate)
    plan = make_plan("wan2.2", steps=10)
    assert asked == [("h100", 75_600, 40, 0.06, 128)] and plan.timed.source == calls.BY_ESTIMATE
    assert plan.seconds.sparse_cells == pytest.approx(10 * 2 * 40 * 0.020)
    assert plan.timed.overhead == pytest.approx(0.010) and plan.memory.call == 2 << 30
    for other in ({"gpu": "a100"}, {"paper": True}):
        assert make_plan("wan2.2", **other).timed.source == calls.BY_RATES
    monkeypatch.setattr(calls, "stored_gpus", lambda: [])  # a table without this GPU
    assert make_plan("wan2.2").timed.source == calls.BY_RATES


def test_every_model_that_accelerate_takes_can_be_planned() -> None:
    """By name, or by the config of its class; ControlNets run beside a transformer and are not planned."""
    diffusers_room = pytest.importorskip("residua.hosts.diffusers")
    classes = {name for name in diffusers_room.supported() if "ControlNet" not in name}
    assert classes <= set(READERS)
    for name in ALIASES.values():
        assert name in MODELS
    for name, model in MODELS.items():
        assert model.parameters > 0, name
        if model.text == "cross" and name != "world":
            assert matrix_parameters(model) == pytest.approx(model.parameters, rel=0.35), name


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("RTX4090", "4090"),
        ("rtx-4090", "4090"),
        ("NVIDIA GeForce RTX 5090", "5090"),
        ("rtx3090", "3090"),
        ("L40S", "l40s"),
        ("H200", "h200"),
        ("RTX A6000", "a6000"),
        ("rtx 6000 ada", "rtx6000-ada"),
        ("a100-80gb", "a100"),
        ("hopper", "h100"),
    ],
)
def test_gpus_by_the_names_that_people_use(gpu: str, name: str) -> None:
    assert make_plan("world", gpu=gpu).machine is MACHINES[name]


def test_a_gpu_that_is_not_modelled_is_said() -> None:
    with pytest.raises(InputError, match="not modelled; Residua's kernels were compiled for NVIDIA alone"):
        make_plan("world", gpu="MI300X")


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"model": "world", "size": "32x32", "frames": 16}, "stay dense"),
        ({"model": "wan2.2-i2v-a14b", "density": 1.0}, "skips nothing"),
        ({"model": "wan2.2-i2v-a14b", "steps": 1, "paper": True}, "take more steps"),
        (
            {"model": "wan2.2-i2v-a14b", "size": "832x480", "frames": 17, "gpu": "b200", "paper": True},
            "grouping and routing",
        ),
    ],
)
def test_not_worth_it_here(request_: dict, why: str) -> None:
    plan = make_plan(**request_)
    assert not plan.worth_it
    assert plan.verdict.startswith("not worth it here")
    assert why in plan.verdict


@pytest.mark.parametrize("request_", [{"density": 1.0}, {"steps": 1, "paper": True}, {"size": "320x192", "frames": 5}])
def test_without_sparse_calls_nothing_changes(request_: dict) -> None:
    plan = make_plan("wan2.2-i2v-a14b", **request_)
    assert plan.schedule.sparse_calls == 0
    assert plan.speedup == plan.attention_speedup == 1.0
    assert plan.sparse_pflops == plan.dense_pflops
    assert plan.memory.call == plan.memory.state == 0


def test_a_density_that_cannot_be_reached_is_said() -> None:
    plan = make_plan("hunyuanvideo", density=0.001)
    assert plan.call.density > 0.001
    assert any("cannot be reached" in note for note in plan.notes)


def test_odd_sizes_and_frames_are_noted() -> None:
    plan = make_plan("wan2.2-i2v-a14b", "1279x725", frames=80)
    assert plan.grid == (20, 45, 79)
    assert any("cropped to 1264x720" in note for note in plan.notes)
    assert any("80 frames are counted as 77" in note for note in plan.notes)
    assert any("padded to 1280x736" in note for note in make_plan("cosmos3-nano-16b").notes)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"model": "wan9"}, "no such model"),
        ({"model": "Wan-AI/Wan2.2-T2V-A14B-Diffuser"}, "did you mean 'wan-ai/wan2.2-t2v-a14b-diffusers'"),
        ({"model": ""}, "wanted one of"),
        ({"model": None}, "wanted one of"),
        ({"model": "a" * 5000}, "no such model"),
        ({"model": "no\0name"}, "no such model"),
        ({"gpu": "h999"}, "h100"),
        ({"gpu": None}, "h100"),
        ({"size": "1280"}, "1280x720"),
        ({"size": "1280x"}, "1280x720"),
        ({"size": "-1280x720"}, "1280x720"),
        ({"size": "0x720"}, "whole number"),
        ({"size": "99999999999x1"}, "1280x720"),
        ({"size": (1280.0, 720)}, "whole number"),
        ({"size": "8x8"}, "not one token"),
        ({"frames": 0}, "frames=0"),
        ({"frames": True}, "frames=True"),
        ({"frames": 10**9}, "whole number"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"density": 0.0}, "density=0.0"),
        ({"density": 1.5}, "density=1.5"),
        ({"density": math.nan}, "density=nan"),
    ],
)
def test_bad_requests_say_what_is_wanted(request_: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make_plan(**{"model": "wan2.2-i2v-a14b", **request_})


def test_names_are_forgiving() -> None:
    assert make_plan(" HunyuanVideo ", "1280X720", gpu="H100").model is MODELS["hunyuanvideo"]
