"""Whole pipelines of diffusers, end to end to the latents."""

import pytest
import torch

from residua import State, accelerate

NAMES = [
    "wan",
    "wan22 i2v",
    "wan vace",
    "skyreels forcing",
    "hunyuan",
    "cosmos 2.5",
    "cosmos 3",
    "cogvideox",
    "ltx",
    "mochi",
]
STEPS = 5


@pytest.mark.parametrize("name", NAMES)
def test_pipeline(name, pipes, speed_up):
    tiny = pipes.build(name)
    dense = tiny(STEPS)
    with speed_up(tiny.pipe, 1.0) as handle:
        assert (tiny(STEPS) - dense).abs().max() <= 1e-4 * dense.abs().max()
        assert handle.report().total.sparse > 0
    with speed_up(tiny.pipe, 0.22, dense_steps=0.4) as handle:
        out = tiny(STEPS)
        report = handle.report()
        again = tiny(STEPS)
    assert not torch.equal(out, dense)
    assert torch.equal(out, again)  # the second run started cold
    assert torch.equal(tiny(STEPS), dense)
    branches = 1 if name in ("cogvideox", "ltx", "mochi") else 2  # these batch both
    text = {"text pathway": STEPS * branches} if name == "cosmos 3" else {}
    for layer in (layer for item in report.transformers for layer in item.layers):
        assert layer.sparse + layer.dense.get("first steps", 0) + sum(text.values()) == sum(
            shape["calls"] for shape in layer.shapes
        )
        if name != "wan22 i2v":
            assert layer.dense == {"first steps": 2 * branches, **text}
            assert (layer.sparse, layer.warm) == (3 * branches, 2 * branches)
        assert layer.sparse == 0 or layer.density == layer.pairs["total"] / layer.pairs["possible"]


def test_second_transformer_of_wan22_starts_cold_and_has_no_dense_steps_of_its_own(pipes, speed_up):
    tiny = pipes.wan22_i2v()
    handle = speed_up(tiny.pipe, 0.22, dense_steps=0.2)
    tiny(STEPS)
    first, second = handle.report().transformers
    assert (first.name, second.name) == ("transformer", "transformer_2")
    switch = sum(shape["calls"] for shape in first.layers[0].shapes) // 2
    assert 0 < switch < STEPS  # both transformers took part
    for layer in first.layers:
        assert (layer.dense, layer.sparse) == ({"first steps": 2}, 2 * (switch - 1))
    for layer in second.layers:
        assert (layer.dense, layer.sparse, layer.warm) == ({}, 2 * (STEPS - switch), 2 * (STEPS - switch - 1))


def test_second_transformer_of_wan22_borrows_groups_of_its_own_run_alone(pipes, speed_up, monkeypatch):
    lent, start_from = [], State.start_from
    monkeypatch.setattr(State, "start_from", lambda self, other: lent.append(other) or start_from(self, other))
    tiny = pipes.wan22_i2v()
    with speed_up(tiny.pipe, 0.22) as handle:
        first, second = (attachment.host for attachment in handle.attachments)
        outs = [tiny(STEPS) for _ in range(2)]
        lent.clear()
        tiny(STEPS)
        layers = len(handle.attachments[0].layers)
        # uncond from cond in both transformers, and cond of the second from cond of the first
        assert len(lent) == 3 * layers
        assert second.lenders == (first,) and first.lenders == ()
    assert torch.equal(*outs)


PRESETS = {"wan": (0.22, 0.20, 0.03), "hunyuan": (0.22, 0.10, 1), "cosmos 2.5": (0.22, 2, 1), "cosmos 3": (0.26, 2, 1)}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_the_paper_are_applied(name, pipes):
    density, steps, layers = PRESETS[name]
    tiny = pipes.build(name)
    with accelerate(tiny.pipe, method="paper") as handle:
        tiny(1)
        [item] = handle.report().transformers
    assert item.settings["config"]["density"] == density
    assert (item.settings["dense_steps"], item.settings["dense_layers"]) == (steps, layers)
    assert item.settings["min_tokens"] == 4096
    assert item.total.sparse == 0  # one step, which is among the first


def test_a_short_video_stays_dense_and_says_why(pipes):
    tiny = pipes.wan()
    dense = tiny(3)
    with accelerate(tiny.pipe, method="paper") as handle:
        assert torch.equal(tiny(3), dense)
        total = handle.report().total
    # Two layers, two branches, three steps; of the two layers the first is one of the first.
    assert total.dense == {"first steps": 4, "first layers": 4, "fewer than min_tokens": 4}
    assert total.sparse == 0


def test_batches_and_several_videos_per_prompt(pipes, speed_up):
    tiny = pipes.wan()
    dense = tiny(3, num_videos_per_prompt=2)
    with speed_up(tiny.pipe, 1.0) as handle:
        assert (tiny(3, num_videos_per_prompt=2) - dense).abs().max() <= 1e-4 * dense.abs().max()
        assert {shape["q"][0] for shape in handle.report().total.shapes} == {2}
    with speed_up(tiny.pipe, 0.22) as handle:
        tiny(3, num_videos_per_prompt=2)
        tiny(3)  # another batch size starts cold
        assert [(layer.sparse, layer.warm) for layer in handle.report().transformers[0].layers] == [(8, 4)] * 2


def test_another_resolution_starts_cold(pipes, speed_up):
    tiny = pipes.wan()
    with speed_up(tiny.pipe, 0.22) as handle:
        tiny(3)
        tiny(3, width=160)
        [item] = handle.report().transformers
    assert item.grids == [(3, 8, 8), (3, 8, 10)] and item.runs == 2
    assert [(layer.sparse, layer.warm) for layer in item.layers] == [(8, 4)] * 2


def test_the_scheduler_may_be_exchanged_after(pipes, speed_up):
    from diffusers import FlowMatchEulerDiscreteScheduler

    tiny = pipes.wan()
    with speed_up(tiny.pipe, 0.22, dense_steps=0.5) as handle:
        tiny.pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        tiny(4)
        assert handle.report().total.dense == {"first steps": 8}


def test_the_pipeline_in_the_box(speed_up):
    from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

    from residua.world.model import TRANSFORMER_CONFIG, PromptTable
    from residua.world.pipeline import WorldPipeline

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = WanTransformer3DModel(**{**TRANSFORMER_CONFIG, "num_layers": 2}).eval()
    pipe = WorldPipeline(model, FlowMatchEulerDiscreteScheduler(shift=3.0), PromptTable())
    pipe.set_progress_bar_config(disable=True)

    def run():
        return pipe(
            "a red clay ball dropped on a sand floor at noon",
            height=32,
            width=32,
            num_frames=6,
            num_inference_steps=3,
            guidance_scale=2.0,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
        ).frames

    dense = run()
    with speed_up(pipe, 1.0) as handle:
        assert (run() - dense).abs().max() <= 1e-4 * dense.abs().max()
        [item] = handle.report().transformers
    assert item.grids == [(6, 8, 8)]
    assert [(layer.sparse, layer.warm, layer.dense) for layer in item.layers] == [(4, 2, {"first steps": 2})] * 2
    assert torch.equal(run(), dense)
