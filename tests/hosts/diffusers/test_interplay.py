"""With the other things that people switch on: offload, caches, backends, adapters, precisions."""

import pytest
import torch
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import apply_group_offloading

from residua import InputError, IntegrationError

CPU = torch.device("cpu")
EXPECTED = [(6, 4, {"first steps": 2})] * 3


@pytest.fixture
def wan(tiny):
    return build(tiny)


def build(tiny):
    with torch.random.fork_rng():
        return tiny.settled(tiny.wan(layers=3))


@pytest.fixture
def expected(tiny, scheduler, denoise, speed_up):
    """Dense and sparse outputs of a model like `wan` with nothing else switched on."""
    model, inputs = build(tiny)
    dense = denoise(model, inputs, scheduler)
    with speed_up(model, scheduler=scheduler):
        return dense, denoise(model, inputs, scheduler)


def counts(handle):
    return [(layer.sparse, layer.warm, layer.dense) for layer in handle.report().transformers[0].layers]


def model_offload(model):
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(model, execution_device=CPU)


def sequential_offload(model):
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=CPU)
    assert model.blocks[0].attn1.to_q.weight.device.type == "meta"


def hooked_and_unhooked(model):
    from accelerate import cpu_offload_with_hook
    from accelerate.hooks import remove_hook_from_module

    cpu_offload_with_hook(model, execution_device=CPU)
    remove_hook_from_module(model, recurse=True)


def group_offload(kind, **more):
    def switch_on(model):
        try:
            apply_group_offloading(model, onload_device=CPU, offload_device=CPU, offload_type=kind, **more)
        except AttributeError as error:
            pytest.skip(f"group offload of this diffusers needs an accelerator: {error}")

    return switch_on


CHANGES = {
    "model offload": model_offload,
    "sequential offload": sequential_offload,
    "offload on and off": hooked_and_unhooked,
    "group offload, leaves": group_offload("leaf_level"),
    "group offload, blocks": group_offload("block_level", num_blocks_per_group=1),
    "fused qkv": lambda model: model.fuse_qkv_projections(),
    "first block cache that never skips": lambda model: model.enable_cache(
        FirstBlockCacheConfig(threshold=-1.0)  # inputs stand still here: two steps may be the same
    ),
    "math backend": lambda model: model.set_attention_backend("_native_math"),
    "backend reset": lambda model: model.reset_attention_backend(),
}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_same_calls_and_same_video(change, order, wan, scheduler, denoise, speed_up, expected):
    model, inputs = wan
    dense, sparse = expected
    if order == "before":
        CHANGES[change](model)
    handle = speed_up(model, scheduler=scheduler)
    if order == "after":
        CHANGES[change](model)
    assert torch.allclose(denoise(model, inputs, scheduler), sparse, atol=2e-5)
    assert counts(handle) == EXPECTED
    handle.remove()
    assert torch.allclose(denoise(model, inputs, scheduler), dense, atol=2e-5)
    assert counts(handle) == EXPECTED


def test_a_backend_set_while_accelerated_is_used_and_stays(wan, scheduler, denoise, speed_up):
    model, inputs = wan
    handle = speed_up(model, scheduler=scheduler)
    model.set_attention_backend("_native_math")
    denoise(model, inputs, scheduler)
    assert all(layer.backend.value == "_native_math" for layer in handle.attachments[0].layers)
    handle.remove()
    assert model.blocks[0].attn1.processor._attention_backend.value == "_native_math"


def test_fused_and_unfused_qkv_of_cogvideox(tiny, scheduler, denoise, speed_up):
    """Here diffusers exchanges the processor."""
    model, inputs = tiny.build("cogvideox")
    dense = denoise(model, inputs, scheduler)
    handle = speed_up(model, scheduler=scheduler)
    sparse = denoise(model, inputs, scheduler)
    handle.clear()
    model.fuse_qkv_projections()
    assert torch.allclose(denoise(model, inputs, scheduler), sparse, atol=2e-5)
    model.unfuse_qkv_projections()
    assert torch.equal(denoise(model, inputs, scheduler), sparse)
    assert handle.report().total.sparse == 24
    handle.remove()
    assert torch.equal(denoise(model, inputs, scheduler), dense)


def test_first_block_cache_that_skips(wan, scheduler, denoise, speed_up):
    """Skipped blocks make no calls; the first block runs always."""
    model, inputs = wan
    handle = speed_up(model, scheduler=scheduler)
    model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    denoise(model, inputs, scheduler)
    assert counts(handle) == [(6, 4, {"first steps": 2}), (0, 0, {"first steps": 2}), (0, 0, {"first steps": 2})]


def test_pyramid_attention_broadcast(wan, scheduler, denoise, speed_up):
    """Every second attention output is taken from the step before."""
    model, inputs = wan
    handle = speed_up(model, scheduler=scheduler)
    model.enable_cache(
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(0, 1000),
            current_timestep_callback=lambda: 500,
        )
    )
    assert torch.isfinite(denoise(model, inputs, scheduler)).all()
    total = handle.report().total
    assert 0 < total.sparse < 18 and total.sparse + total.dense_calls == 12
    handle.remove()
    model.disable_cache()


def test_lora_loaded_before_and_after(wan, scheduler, denoise, speed_up, tmp_path):
    pytest.importorskip("peft")
    from peft import LoraConfig

    model, inputs = wan
    lora = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights="gaussian")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.add_adapter(lora)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(weight, 0.1)
    dense = denoise(model, inputs, scheduler)
    with speed_up(model, 1.0, scheduler=scheduler):
        assert torch.allclose(denoise(model, inputs, scheduler), dense, atol=5e-5)
    handle = speed_up(model, 1.0, scheduler=scheduler)
    model.disable_adapters()
    base = denoise(model, inputs, scheduler)
    assert not torch.allclose(base, dense, atol=1e-3)
    model.enable_adapters()
    assert torch.allclose(denoise(model, inputs, scheduler), dense, atol=5e-5)
    model.save_lora_adapter(tmp_path)
    model.delete_adapters("default")
    assert torch.allclose(denoise(model, inputs, scheduler), base, atol=5e-5)
    model.load_lora_adapter(tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors")
    assert torch.allclose(denoise(model, inputs, scheduler), dense, atol=5e-5)
    assert handle.report().total.sparse == 72


def test_lora_swapped_in_a_compiled_model(wan, scheduler, denoise, speed_up, tiny, tmp_path):
    pytest.importorskip("peft")
    from peft import LoraConfig

    wanted = []
    for seed in range(2):
        other, inputs = build(tiny)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            other.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"]))
            for name, weight in other.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.3)
        wanted.append(denoise(other, inputs, scheduler))
        other.save_lora_adapter(tmp_path / str(seed))
    assert not torch.allclose(*wanted, atol=1e-2)
    model, inputs = wan
    handle = speed_up(model, 1.0, scheduler=scheduler)
    model.enable_lora_hotswap(target_rank=4)
    for seed in range(2):
        model.load_lora_adapter(
            tmp_path / str(seed),
            prefix=None,
            weight_name="pytorch_lora_weights.safetensors",
            adapter_name="style",
            hotswap=seed == 1,
        )
        if seed == 0:
            torch._dynamo.reset()
            model.compile_repeated_blocks(backend="eager", fullgraph=True)
        assert torch.allclose(denoise(model, inputs, scheduler), wanted[seed], atol=5e-5)
    assert handle.report().total.sparse == 36


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_bf16(mode, wan, scheduler, denoise, speed_up):
    model, inputs = wan
    model.to(torch.bfloat16)
    inputs = {
        key: value.bfloat16() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    dense = denoise(model, inputs, scheduler)
    speed_up(model, 1.0, scheduler=scheduler)
    with getattr(torch, mode)():
        out = denoise(model, inputs, scheduler)
    assert out.dtype == torch.bfloat16
    assert (out - dense).abs().max() <= 0.05 * dense.abs().max()


def test_autocast(wan, scheduler, denoise, speed_up):
    model, inputs = wan
    with torch.autocast("cpu", torch.bfloat16):
        dense = denoise(model, inputs, scheduler)
        handle = speed_up(model, 1.0, scheduler=scheduler)
        out = denoise(model, inputs, scheduler)
    assert (out - dense).abs().max() <= 0.05 * dense.abs().max()
    assert handle.report().total.sparse == 18


def test_gradients_are_refused(wan, scheduler, speed_up, one_pass):
    model, inputs = wan
    speed_up(model, scheduler=scheduler)
    scheduler.set_timesteps(4)
    with pytest.raises(InputError, match="for inference; run the model under"):
        one_pass(model, inputs)


def test_offload_of_a_whole_pipeline(pipes, speed_up):
    """maybe_free_model_hooks takes the offload hooks off and puts them on again after each run."""
    from accelerate import cpu_offload_with_hook
    from accelerate.hooks import remove_hook_from_module

    tiny = pipes.wan()
    handle = speed_up(tiny.pipe)
    expected = tiny(3)
    for _ in range(2):
        cpu_offload_with_hook(tiny.pipe.transformer, execution_device=CPU)
        assert torch.equal(tiny(3), expected)
        remove_hook_from_module(tiny.pipe.transformer, recurse=True)
    assert [(layer.sparse, layer.warm) for layer in handle.report().transformers[0].layers] == [(12, 6)] * 2


def perturb_the_first_layer(model):
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    skip = LayerSkipConfig(
        indices=[0], fqn="transformer_blocks", skip_attention=False, skip_attention_scores=True, skip_ff=False
    )
    try:
        apply_layer_skip(model, skip)
    except ValueError as error:
        pytest.skip(f"this diffusers cannot perturb Qwen-Image: {error}")


def test_perturbed_attention_guidance_is_left_to_diffusers(tiny, scheduler, denoise, speed_up):
    """Its hook replaces torch's attention by the values, which a sparse call would not notice."""
    model, inputs = tiny.build("qwen image")
    plain = denoise(model, inputs, scheduler)
    perturb_the_first_layer(model)
    perturbed = denoise(model, inputs, scheduler)
    handle = speed_up(model, 1.0, scheduler=scheduler)
    out = denoise(model, inputs, scheduler)
    first, second = handle.report().transformers[0].layers
    assert first.sparse == 0 and first.dense == {"attention is replaced by a torch function mode": 8}
    assert second.sparse == 6
    largest = perturbed.abs().max()
    assert (out - perturbed).abs().max() <= 2e-5 * largest < (out - plain).abs().max()


def test_perturbed_attention_guidance_in_a_compiled_model_is_an_error(tiny, scheduler, denoise, speed_up):
    """The graph does not contain the hook's function mode, so nothing would be perturbed."""
    model, inputs = tiny.build("qwen image")
    handle = speed_up(model, scheduler=scheduler)
    torch._dynamo.reset()
    model.compile(backend="eager")
    perturb_the_first_layer(model)
    with pytest.raises(IntegrationError, match="in a compiled transformer"):
        denoise(model, inputs, scheduler)
    handle.remove()
    denoise(model, inputs, scheduler)


@pytest.mark.parametrize("name", ["hunyuan", "hunyuan 1.5", "qwen image", "motif"])
def test_a_batch_whose_samples_are_padded_differently(name, tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build(name)
    for key, value in inputs.items():
        if torch.is_tensor(value):
            inputs[key] = value.repeat(2, *[1] * (value.ndim - 1))
            if "mask" in key:
                inputs[key][1, 2:] = 0
    if "img_shapes" in inputs:
        inputs["img_shapes"] = inputs["img_shapes"] * 2
    if "txt_seq_lens" in inputs:
        inputs["txt_seq_lens"] = inputs["txt_seq_lens"] * 2
    dense = denoise(model, inputs, scheduler)
    with speed_up(model, 1.0, scheduler=scheduler) as handle:
        same = denoise(model, inputs, scheduler)
        assert handle.report().total.sparse == 12
    assert (same - dense).abs().max() <= 2e-5 * dense.abs().max()


def test_a_scheduler_of_second_order(pipes, speed_up):
    """Heun asks twice per step, at two timesteps: each is a step of its own, 9 for 5."""
    from diffusers import FlowMatchHeunDiscreteScheduler

    tiny = pipes.wan()
    tiny.pipe.scheduler = FlowMatchHeunDiscreteScheduler(shift=3.0)
    dense = tiny(5)
    with speed_up(tiny.pipe, 1.0) as handle:
        assert (tiny(5) - dense).abs().max() <= 1e-4 * dense.abs().max()
        [item] = handle.report().transformers
    assert item.runs == 1
    assert [(layer.sparse, layer.warm, layer.dense) for layer in item.layers] == [(16, 14, {"first steps": 2})] * 2
