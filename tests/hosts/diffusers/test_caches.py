"""With caches of diffusers that skip blocks or whole branches: keeping everything gives what dense gives."""

import diffusers
import pytest
import torch

STEPS = 8


def taylor_seer():
    return diffusers.TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2, max_order=1)


def mag_cache():
    ratios = torch.linspace(1.0, 0.9, STEPS)
    return diffusers.MagCacheConfig(num_inference_steps=STEPS, threshold=0.5, max_skip_steps=2, mag_ratios=ratios)


def sea_cache():
    return diffusers.SeaCacheConfig()


CACHES = {"TaylorSeerCacheConfig": taylor_seer, "MagCacheConfig": mag_cache, "SeaCacheConfig": sea_cache}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", CACHES)
def test_keeping_everything_is_dense(name, order, tiny, scheduler, denoise, speed_up):
    tiny.need(name)
    model, inputs = tiny.build("wan")
    if order == "before":
        model.enable_cache(CACHES[name]())
    handle = speed_up(model, 1.0, scheduler=scheduler)
    if order == "after":
        model.enable_cache(CACHES[name]())
    same = denoise(model, inputs, scheduler, STEPS)
    assert handle.report().total.sparse > 0
    handle.remove()
    model._reset_stateful_cache()
    dense = denoise(model, inputs, scheduler, STEPS)
    assert (same - dense).abs().max() <= 2e-5 * dense.abs().max()


def test_faster_cache_leaves_out_a_branch_of_the_batch(pipes, speed_up):
    tiny = pipes.cogvideox()
    pipe = tiny.pipe
    pipe.transformer.enable_cache(
        diffusers.FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 681),
            current_timestep_callback=lambda: pipe._current_timestep,
            tensor_format="BFCHW",
            attention_weight_callback=lambda _: 0.5,
            unconditional_batch_skip_range=3,
            unconditional_batch_timestep_skip_range=(-1, 781),
        )
    )
    dense = tiny(STEPS)
    with speed_up(pipe, 1.0) as handle:
        assert (tiny(STEPS) - dense).abs().max() <= 2e-5 * dense.abs().max()
        total = handle.report().total
    assert {shape["q"][0] for shape in total.shapes} == {1, 2} and total.sparse > 0
    assert torch.equal(tiny(STEPS), dense)
