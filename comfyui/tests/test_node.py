"""The node on a stand-in host, written from ComfyUI's contract."""

import json
import logging
from pathlib import Path

import pytest
import torch
from residua_comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from residua_comfyui.patch import OVERRIDE, Patch, patch_of
from residua_comfyui.tokens import Tokens, latent_grid, tokens_of

from residua import Config

FOLDER = Path(__file__).parents[1]
CALLS = 4 * 2 * 3  # steps, branches, blocks


@pytest.mark.parametrize("name", ["wan", "cosmos", "hunyuan", "hunyuan, text first"])
def test_every_model(name, host, checks):
    found = checks.check_model(host, name)
    assert found["split - batched, layers entry by entry, dense"] == 0


def total(model):
    return patch_of(model).report().total


@pytest.mark.parametrize("batched", [True, False])
def test_states_follow_steps_and_branches(batched, host, checks):
    model = checks.sparse(host.build("wan"))
    host.sample(model, batched=batched)
    assert (total(model).sparse, total(model).warm, total(model).dense) == (CALLS, CALLS * 3 // 4, {})
    [transformer] = patch_of(model).report().transformers
    assert {row.name for row in transformer.branches} == {"cond", "uncond"}
    assert [row.name for row in transformer.layers] == ["double 0", "double 1", "double 2"]
    assert len(transformer.steps) == 4 and transformer.grids == [(3, 8, 8)]


def test_layers_of_two_kinds_of_blocks(host, checks):
    model = checks.sparse(host.build("hunyuan"), dense_layers=3)
    host.sample(model)
    [transformer] = patch_of(model).report().transformers
    assert {row.name: row.sparse > 0 for row in transformer.layers} == {
        "double 0": False,
        "double 1": False,
        "single 0": False,
        "single 1": True,
    }


@pytest.mark.parametrize("name", ["hunyuan", "hunyuan, text first"])
def test_text_is_pinned_exact_and_its_padding_masked(name, host, checks):
    model = checks.sparse(host.build(name))
    host.sample(model)
    assert total(model).pairs["pinned"] > 0 and total(model).pairs["exact"] > 0 and not total(model).dense


def test_an_additive_bias_is_not_padding(host, checks):
    patch = patch_of(checks.sparse(host.build("wan")))
    bias = torch.zeros(1, 1, 9)
    assert patch._padding(bias, 2).dtype is torch.bool
    bias = bias - 0.5
    assert patch._padding(bias, 2) is bias
    square = torch.zeros(1, 9, 9)
    assert patch._padding(square, 2) is square


def test_a_model_that_says_no_block_is_counted_and_said_once(host, checks, caplog):
    model = checks.sparse(host.build("cosmos"))
    host.sample(model)
    host.sample(model)
    assert total(model).warm == CALLS * 3 // 4
    said = [record.message for record in caplog.records if "which block runs" in record.message]
    assert len(said) == 1


def test_an_unknown_model_stays_dense_with_its_reason(host, checks, caplog):
    model = host.build("unheard")
    dense = host.sample(model)
    model = checks.sparse(model)
    assert torch.equal(host.sample(model), dense)
    assert list(total(model).dense) == ["video tokens unknown"]
    [said] = [record.message for record in caplog.records if "stays dense" in record.message]
    assert "Unheard: 7 of 199 tokens are text somewhere" in said


def test_another_override_computes_the_dense_calls(host, checks):
    model, seen = host.build("wan"), []

    def other(func, q, k, v, heads, *args, **more):
        seen.append(q.shape[1] == k.shape[1])
        return func(q, k, v, heads, *args, **more)

    model.model_options["transformer_options"][OVERRIDE] = other
    dense = host.sample(model)
    seen.clear()
    with_both = checks.sparse(model, dense_layers=1)
    assert not torch.equal(host.sample(with_both), dense)
    # batched: 4 steps; the first block's self-attention and all three cross-attentions
    assert (seen.count(True), seen.count(False)) == (4, 12)
    assert model.model_options["transformer_options"][OVERRIDE] is other


def test_tensors_in_containers_are_unwrapped_by_the_host(host, checks):
    """Newer versions may pass q, k and v in containers, and unwrap them for an override that does not say
    that it takes containers."""
    patch = patch_of(checks.sparse(host.build("wan")))
    assert not hasattr(patch, "container_function")


def test_the_node_twice_is_the_later_one(host, checks):
    model = host.build("wan")
    once = checks.sparse(model, 0.4)
    expected = host.sample(once)
    twice = checks.sparse(checks.sparse(model, 0.22), 0.4)
    assert torch.equal(host.sample(twice), expected)
    assert patch_of(twice).before is None and total(twice).sparse == CALLS


def test_start_and_end_percent(host, checks):
    model = checks.sparse(host.build("wan"), sigmas=(0.8, 0.4))  # noise levels 1, 0.75, 0.5, 0.25
    host.sample(model)
    assert total(model).sparse == CALLS // 2
    assert total(model).dense == {"outside of start and end percent": CALLS // 4}  # both branches in one call


@pytest.mark.parametrize("sigmas, removed", [({}, (0.25,) * 4), ({"sigmas": (0.8, 0.4)}, ())])
def test_a_budget_follows_the_noise_if_all_steps_may_be_sparse(sigmas, removed, host, checks):
    model = checks.sparse(host.build("wan"), **sigmas)
    host.sample(model)
    assert patch_of(model)._now.removed == removed


def test_samplers_that_ask_between_two_steps(host, checks):
    model = checks.sparse(host.build("wan"))
    host.sample(model, middle=True)
    [transformer] = patch_of(model).report().transformers
    assert total(model).sparse == 2 * CALLS and len(transformer.steps) == 4
    assert total(model).warm == 2 * CALLS * 3 // 4


def test_skipped_blocks_make_no_calls_and_mix_nothing_up(host, checks):
    model = checks.sparse(host.build("wan"))
    host.sample(model, options={"skip_blocks": {2: (1,)}})
    calls = {row.name: row.sparse for row in patch_of(model).report().transformers[0].layers}
    assert calls == {"double 0": 8, "double 1": 6, "double 2": 8}


def test_several_videos_at_once(host, checks):
    model = host.build("wan")
    dense = host.sample(model, videos=2)
    assert checks.apart(host.sample(checks.sparse(model, 1.0), videos=2), dense) <= 1e-5
    low = checks.sparse(model)
    with checks.EntryByEntry():  # otherwise layers of torch round differently with four entries than with two
        assert torch.equal(host.sample(low, videos=2, batched=False), host.sample(low, videos=2))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interruption_leaves_nothing_behind(error, host, checks):
    model = checks.sparse(host.build("wan"))
    expected = host.sample(model)

    def stop(step):
        if step == 2:
            raise error("stop")

    with pytest.raises(error):
        host.sample(model, on_step=stop)
    assert not patch_of(model).host.warm
    assert torch.equal(host.sample(model), expected)


def test_an_error_stops_or_goes_on_dense(host, checks, monkeypatch, caplog):
    model = host.build("wan")
    dense = host.sample(model)

    def fail(*_, **__):
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr("residua.baselines.own.attention", fail)
    with pytest.raises(ZeroDivisionError):
        host.sample(checks.sparse(model))
    goes_on = checks.sparse(model, on_error="dense")
    assert torch.equal(host.sample(goes_on), dense)
    assert total(goes_on).dense == {"error in the sparse call": CALLS // 2}  # both branches in one call
    assert any("in the middle" in record.message and record.levelno == logging.WARNING for record in caplog.records)


def test_what_no_backend_takes_stays_dense(host, checks, monkeypatch):
    model = host.build("wan")
    dense = host.sample(model)
    monkeypatch.setattr(checks, "TINY", Config(backend="no-such"))
    model = checks.sparse(model)
    assert torch.equal(host.sample(model), dense)
    assert list(total(model).dense) == ["not supported"]


def test_a_compiled_model(host, checks):
    model = host.build("wan")
    expected = host.sample(checks.sparse(model))
    model.base.diffusion_model = torch.compile(model.base.diffusion_model, backend="eager")
    assert checks.apart(host.sample(checks.sparse(model)), expected) <= 1e-5


def test_the_weights_may_change_under_it(host, checks):
    """As a LoRA does: the clone shares the weights."""
    model = host.build("wan")
    low = checks.sparse(model)
    before = host.sample(low)
    with torch.no_grad():
        model.base.diffusion_model.groups[0][0].out.weight.mul_(1.5)
    assert not torch.equal(host.sample(low), before)
    assert checks.apart(host.sample(checks.sparse(model, 1.0)), host.sample(model)) <= 1e-5


def defaults(node):
    given = node.INPUT_TYPES()["required"]
    return {name: entry[1]["default"] for name, entry in given.items() if "default" in entry[1]}


def test_the_nodes_as_the_host_uses_them(host, capsys):
    node, report = (NODE_CLASS_MAPPINGS[name]() for name in ("ResiduaSparseAttention", "ResiduaReport"))
    [model] = getattr(node, node.FUNCTION)(model=host.build("wan"), **defaults(node))
    latent = {"samples": host.sample(model)}
    shown = getattr(report, report.FUNCTION)(model=model, latent=latent, rows="layer")
    text, picture = shown["result"]
    assert text.startswith("Nothing ran sparse: 192 video tokens < min_tokens 4,096")
    assert text in capsys.readouterr().out and shown["ui"]["text"] == [text]
    assert picture.ndim == 4 and picture.shape[-1] == 3 and 0 <= picture.min() < picture.max() <= 1
    assert set(NODE_CLASS_MAPPINGS) == set(NODE_DISPLAY_NAME_MAPPINGS)
    for entry in node.INPUT_TYPES()["required"].values():
        assert entry[1]["tooltip"]


def test_by_density_and_a_picture_with_bars(host):
    node, report = (NODE_CLASS_MAPPINGS[name]() for name in ("ResiduaSparseAttention", "ResiduaReport"))
    chosen = {**defaults(node), "quality": "by density", "density": 0.5, "min_tokens": 0}
    [model] = node.apply(model=host.build("wan"), **{**chosen, "start_percent": 0.2})
    assert patch_of(model).sigmas == (0.8, 0.0)
    [model] = node.apply(model=host.build("wan"), **chosen)
    assert patch_of(model).host.settings.config == Config(density=0.5)
    host.sample(model)
    text, picture = report.show(model, {}, "step")["result"]
    assert "step 3" in text and picture.shape[1] > 150


def test_by_default_nothing_is_dense_by_rule(host):
    node = NODE_CLASS_MAPPINGS["ResiduaSparseAttention"]()
    [model] = node.apply(model=host.build("wan"), **{**defaults(node), "min_tokens": 0})
    host.sample(model)
    total = patch_of(model).report().total
    assert total.sparse and not total.dense


def test_the_grid_is_what_newer_models_say():
    """`grid_sizes` counts before the latents' own shape: a model may pad or crop."""
    wan = type("WanModel", (), {"patch_size": (1, 2, 2)})()
    grid = latent_grid(wan, torch.zeros(1, 16, 3, 8, 8))
    assert grid == (3, 4, 4) and tokens_of(wan, grid, {}, 48) == Tokens((3, 4, 4))
    told = {"grid_sizes": torch.tensor([3, 4, 6])}
    assert tokens_of(wan, grid, told, 72) == Tokens((3, 4, 6))
    assert tokens_of(wan, grid, told, 48) is None  # shorter than the video: cross-attention to something


def test_a_report_without_a_sparse_model(host):
    text, _ = NODE_CLASS_MAPPINGS["ResiduaReport"]().show(host.build("wan"), {}, "layer")["result"]
    assert "nothing to report" in text


@pytest.mark.parametrize("path", sorted((FOLDER / "workflows").glob("*.json")), ids=lambda path: path.stem)
def test_workflows_hold_our_nodes_with_valid_values(path):
    workflow = json.loads(path.read_text())
    nodes = {node["id"]: node for node in workflow["nodes"]}
    types = [node["type"] for node in nodes.values()]
    assert "ResiduaSparseAttention" in types and "ResiduaReport" in types
    for _, source, source_slot, target, target_slot, kind in workflow["links"]:
        assert nodes[source]["outputs"][source_slot]["type"] == kind
        assert nodes[target]["inputs"][target_slot]["type"] in (kind, "*")
    for node in nodes.values():
        if node["type"] in NODE_CLASS_MAPPINGS:
            given = NODE_CLASS_MAPPINGS[node["type"]].INPUT_TYPES()["required"]
            widgets = [entry for entry in given.values() if entry[0] not in ("MODEL", "LATENT")]
            assert len(widgets) == len(node["widgets_values"])
            for (kind, limits), value in zip(widgets, node["widgets_values"], strict=True):
                assert value in kind if isinstance(kind, list) else limits["min"] <= value <= limits["max"]


def test_residua_never_imports_the_node():
    import residua

    for file in Path(residua.__file__).parent.rglob("*.py"):
        assert "import comfy" not in file.read_text() and "from comfy" not in file.read_text(), file


def test_a_patch_is_found_behind_a_later_override(host, checks):
    model = checks.sparse(host.build("wan"))
    model.model_options["transformer_options"][OVERRIDE] = lambda func, *args, **more: func(*args, **more)
    assert isinstance(patch_of(model), Patch)
