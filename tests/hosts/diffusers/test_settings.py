"""What may be asked for, what is refused, and which diffusers."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import residua
from residua import Config, InputError, IntegrationError, accelerate
from residua.hosts.diffusers import QUALITIES, Family, Preset, register, supported, versions
from residua.hosts.diffusers.families import base
from residua.hosts.diffusers.versions import check_parts, check_version, require_diffusers
from residua.hosts.settings import part_of


def settings_of(handle):
    return handle.report().transformers[0].settings


def test_everything_can_be_overridden(tiny, scheduler):
    model, _ = tiny.build("wan")
    with accelerate(
        model,
        0.3,
        config=Config(probes=8),
        dense_steps=2,
        dense_layers=0.5,
        layers=[1],
        min_tokens=7,
        scheduler=scheduler,
    ) as handle:
        found = settings_of(handle)
    assert (found["config"]["density"], found["config"]["probes"]) == (0.3, 8)
    assert (found["dense_steps"], found["dense_layers"], found["layers"], found["min_tokens"]) == (2, 0.5, [1], 7)


def test_a_config_alone_keeps_its_density(tiny):
    model, _ = tiny.build("cosmos 3")
    with accelerate(model, config=Config(density=0.4)) as handle:
        assert settings_of(handle)["config"]["density"] == 0.4


def test_nothing_given_is_the_balanced_quality_and_nothing_is_dense_by_rule(tiny):
    model, _ = tiny.build("cosmos 3")
    with accelerate(model) as handle:
        found = settings_of(handle)
    assert found["quality"] == "balanced" and found["config"] == QUALITIES["balanced"].config().to_dict()
    assert (found["dense_steps"], found["dense_layers"]) == (0, 0)


def test_the_papers_method_has_the_settings_of_the_family(tiny):
    model, _ = tiny.build("cosmos 3")
    with accelerate(model, method="paper") as handle:
        found = settings_of(handle)
    assert found["config"] == Config.paper(density=0.26).to_dict()
    assert (found["dense_steps"], found["dense_layers"]) == (2, 1)
    with accelerate(model, config=Config.paper()) as handle:
        found = settings_of(handle)
    assert (found["config"]["density"], found["dense_steps"], found["dense_layers"]) == (0.22, 2, 1)


@pytest.mark.parametrize("name", QUALITIES)
def test_a_quality_is_a_shared_budget_with_a_guard(name, tiny):
    model, _ = tiny.build("hunyuan")
    with accelerate(model, quality=name) as handle:
        found, text = settings_of(handle), str(handle.report())
    wanted = QUALITIES[name]
    assert found["quality"] == name and Config.from_dict(found["config"]) == wanted.config()
    assert (found["config"]["max_error"], found["config"]["density"]) == (wanted.max_error, wanted.density)
    assert found["config"]["balance"] and (found["dense_steps"], found["dense_layers"]) == (0, 0)
    assert f"quality {name} (max_error {wanted.max_error:g}" in " ".join(text.split())


def test_a_better_quality_allows_less_error_and_more_work():
    assert list(QUALITIES) == ["faithful", "balanced", "fast"]
    errors, densities = zip(*((one.max_error, one.density) for one in QUALITIES.values()), strict=True)
    assert list(errors) == sorted(errors) and list(densities) == sorted(densities, reverse=True)


SHARES = [
    (0.1, 50, 5),
    (0.2, 50, 10),
    (0.1, 30, 3),
    (0.03, 60, 2),
    (0.03, 40, 2),
    (0.0, 40, 0),
    (1.0, 40, 40),
    (3, 40, 3),
]


@pytest.mark.parametrize(("share", "total", "part"), SHARES)
def test_shares_round_up(share, total, part):
    assert part_of(share, total) == part


@pytest.mark.parametrize("layers", [[1], [-1], ["blocks.1.attn1"], ["*.1.*"]])
def test_layers_by_number_or_name(layers, tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("wan")
    handle = speed_up(model, scheduler=scheduler, layers=layers)
    denoise(model, inputs, scheduler)
    first, second = handle.report().transformers[0].layers
    assert (first.sparse, first.dense) == (0, {"layer not selected": 8})
    assert (second.sparse, second.dense) == (6, {"first steps": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"density": 0.0}, r"Config\.density=0\.0"),
        ({"config": {"density": 0.2}}, "wanted a residua.Config"),
        ({"quality": "best"}, "quality='best': wanted one of 'faithful', 'balanced', 'fast'"),
        ({"quality": 3}, "quality=3: wanted one of"),
        ({"quality": "fast", "density": 0.3}, "together with density=: .* leave one of them out"),
        (
            {"quality": "fast", "config": Config()},
            r"with config=: .*config=Config\(balance=True, max_error=[\d.]+, density=",
        ),
        ({"dense_steps": -1}, "dense_steps=-1: wanted a whole number, or a share"),
        ({"dense_steps": 1.5}, "dense_steps=1.5"),
        ({"dense_layers": True}, "dense_layers=True"),
        ({"layers": [5]}, "no layer 5; wanted numbers from 0 to 1"),
        ({"layers": ["blocks.7.attn1"]}, "no layer 'blocks.7.attn1'"),
        ({"layers": "blocks.0.attn1"}, "wanted a list of layer numbers or names"),
        ({"layers": [1.5]}, "got 1.5"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"steps": 0}, "steps=0"),
    ],
)
def test_bad_settings_are_refused_before_anything_happens(change, message, tiny):
    model, _ = tiny.build("wan")
    with pytest.raises(InputError, match=message):
        accelerate(model, **change)
    assert not model._forward_pre_hooks and not hasattr(model, "_residua")


def test_a_share_of_unknown_steps_is_an_error(tiny, one_pass):
    model, inputs = tiny.build("wan")
    with accelerate(model, method="paper", min_tokens=0) as handle, torch.no_grad():
        with pytest.raises(IntegrationError, match=r"dense_steps=0.2 is a share .* pass scheduler= or steps="):
            one_pass(model, inputs)
        handle.remove()
    with accelerate(model, method="paper", min_tokens=0, steps=10) as handle, torch.no_grad():
        one_pass(model, inputs)
        assert handle.report().total.dense == {"first steps": 2}


def test_unknown_models_are_named_and_so_are_the_supported_ones():
    with pytest.raises(IntegrationError, match=r"Linear is not a transformer.*WanTransformer3DModel.*add-a-model"):
        accelerate(torch.nn.Linear(1, 1))
    with pytest.raises(IntegrationError, match=r"SimpleNamespace: got neither .* supported transformers: Al"):
        accelerate(SimpleNamespace(unet=torch.nn.Linear(1, 1)))


def test_all_families_of_the_promise_are_there():
    assert set(supported()) == {
        "WanTransformer3DModel", "WanVACETransformer3DModel", "SkyReelsV2Transformer3DModel",
        "HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel", "CosmosTransformer3DModel",
        "Cosmos3OmniTransformer", "CogVideoXTransformer3DModel", "LTXVideoTransformer3DModel",
        "LTX2VideoTransformer3DModel", "MochiTransformer3DModel", "CosmosControlNetModel",
        "ChronoEditTransformer3DModel", "WanAnimateTransformer3DModel", "ConsisIDTransformer3DModel",
        "MotifVideoTransformer3DModel", "HunyuanVideoFramepackTransformer3DModel", "FluxTransformer2DModel",
        "Flux2Transformer2DModel", "QwenImageTransformer2DModel", "MiniMaxH3Transformer3DModel",
        "AllegroTransformer3DModel", "AnyFlowTransformer3DModel", "EasyAnimateTransformer3DModel",
        "HeliosTransformer3DModel", "Kandinsky5Transformer3DModel", "Kandinsky6Transformer3DModel",
        "SD3Transformer2DModel", "ZImageTransformer2DModel", "FluxControlNetModel",
        "QwenImageControlNetModel", "SD3ControlNetModel", "ZImageControlNetModel",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["hunyuan", "ltx 2"])
def test_context_parallelism_is_refused_where_it_is_not_supported(name, tiny):
    model, _ = tiny.build(name)
    ulysses = SimpleNamespace(ring_degree=1, ulysses_degree=2)
    model._parallel_config = SimpleNamespace(context_parallel_config=ulysses)
    with pytest.raises(IntegrationError, match=r"not supported for .*, only for LTX-Video, Wan; run it on one"):
        accelerate(model)


def test_a_family_of_ones_own(tiny, scheduler, denoise, speed_up, monkeypatch):
    """The example of docs/add-a-model.md."""
    monkeypatch.setattr(base.FAMILIES, "data", dict(base.FAMILIES))
    wan = type(tiny.build("wan")[0])
    mine = type("MyTransformer", (wan,), {})

    @register
    class MyFamily(Family):
        name = "Mine"
        models = ("MyTransformer",)
        attention = r"blocks\.\d+\.attn1"
        preset = Preset(0.3, 1, 0, "mine")
        processors = {"WanAttnProcessor": None}  # noqa: RUF012

        def grid(self, model, inputs):
            return 3, 8, 8

    model, inputs = tiny.build("wan")
    model.__class__ = mine
    handle = speed_up(model, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    assert handle.report().transformers[0].family == "Mine"
    assert handle.report().total.sparse == 12


@pytest.mark.parametrize("version", ["0.36.0", "0.36.0.post1", "0.41.0", "0.42.1"])
def test_supported_versions(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.35.2", "0.9.0"])
def test_older_versions_are_refused(version):
    with pytest.raises(IntegrationError, match=rf"diffusers {version}: .* pip install 'diffusers>=0.36,<0.43'"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.43.0", "0.44.0.dev0", "1.0.0", "unknown"])
def test_newer_versions_are_tried_with_one_warning(version, caplog, monkeypatch):
    monkeypatch.setattr(versions, "_warned", set())
    check_version(version)
    check_version(version)
    assert [record.message for record in caplog.records] == [
        f"diffusers {version} was not tested with Residua (0.36 to 0.42 were); compare with dense"
    ]


@pytest.mark.parametrize("part", ["_templated_context_parallel_attention", "_AttentionBackendRegistry"])
def test_a_changed_inside_is_refused(part, monkeypatch):
    from diffusers.models import attention_dispatch

    monkeypatch.delattr(attention_dispatch, part)
    with pytest.raises(IntegrationError, match=f"has no {part} in models/attention_dispatch"):
        check_parts()


def test_a_changed_dispatcher_is_refused(monkeypatch):
    from diffusers.models import attention_dispatch

    monkeypatch.setattr(attention_dispatch, "dispatch_attention_fn", lambda query, key, value: None)
    with pytest.raises(IntegrationError, match=r"dispatch_attention_fn\(backend\)"):
        check_parts()


def test_missing_diffusers_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(IntegrationError, match="diffusers, which is not installed; pip install"):
        require_diffusers()


def test_importing_residua_does_not_import_diffusers():
    check = "import sys, residua, residua.hosts.diffusers; sys.exit('diffusers' in sys.modules)"
    source = str(Path(residua.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", check], env={"PYTHONPATH": source}).returncode == 0


def test_another_method_takes_the_place_of_residua(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("hunyuan")
    outputs = {}
    for method in (None, "anchored", "paper", "svg2"):
        with speed_up(model, scheduler=scheduler, method=method) as handle:
            outputs[method] = denoise(model, inputs, scheduler)
            report = handle.report()
        assert report.total.sparse > 0 and report.transformers[0].settings["method"] == method
        assert (report.total.error is None) == (method == "svg2")
    assert torch.equal(outputs[None], outputs["anchored"])
    assert not torch.equal(outputs["svg2"], outputs["paper"])
    with pytest.raises(InputError, match="method='magic' is not known"):
        speed_up(model, scheduler=scheduler, method="magic")
    with pytest.raises(InputError, match="does not estimate its error"):
        speed_up(model, scheduler=scheduler, method="svg2", config=Config(max_error=0.1))


@pytest.mark.parametrize("steps", [4, 8])
def test_few_steps_have_no_dense_ones_and_are_cold_once(steps, tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("wan")
    handle = speed_up(model, 0.22, scheduler=scheduler, dense_steps=None, dense_layers=None)
    denoise(model, inputs, scheduler, steps)
    for layer in handle.report().transformers[0].layers:
        assert (layer.dense, layer.sparse, layer.warm) == ({}, 2 * steps, 2 * (steps - 1))
