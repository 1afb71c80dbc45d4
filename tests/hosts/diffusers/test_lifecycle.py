"""Put on, taken off, twice, two at once, copied, saved, interrupted: nothing leaks."""

import copy
import pickle
import sys
import threading

import pytest
import torch

from residua import BackendError, Config, IntegrationError, accelerate
from residua.hosts.diffusers import attached
from residua.hosts.diffusers.dispatch import LayerTag, _rebound
from tests.support.interrupt import Place, interrupted_at

WAN = "diffusers.models.transformers.transformer_wan"


def counts(handle):
    return [(layer.sparse, layer.warm, layer.dense) for item in handle.report().transformers for layer in item.layers]


def traces(model):
    """What of ours is still on the model."""
    own = [name for name in vars(model) if name in ("_residua", "cache_context", "_reset_stateful_cache")]
    processors = {module.processor for module in model.modules() if hasattr(module, "processor")}
    tags = [p for p in processors if isinstance(getattr(p, "_attention_backend", None), LayerTag)]
    return own + tags + list(model._forward_pre_hooks)


@pytest.mark.parametrize("name", ["wan", "cosmos 2.5", "mochi"])
def test_remove_leaves_no_trace(name, tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build(name)
    processors = [module.processor for module in model.modules() if hasattr(module, "processor")]
    handle = speed_up(model, scheduler=scheduler)
    assert traces(model)
    denoise(model, inputs, scheduler)
    before = counts(handle)
    handle.remove()
    handle.remove()
    assert traces(model) == []
    assert [m.processor for m in model.modules() if hasattr(m, "processor")] == processors
    assert not handle.active and "removed" in repr(handle)
    assert counts(handle) == before  # the report survives
    assert not _rebound


def test_ctrl_c_while_a_model_is_changed_leaves_it_as_it_was(tiny, scheduler, speed_up):
    model, _ = tiny.build("wan")
    with interrupted_at(Place("hosts/diffusers/dispatch.py", "rebind")) as sent, pytest.raises(KeyboardInterrupt):
        speed_up(model, scheduler=scheduler)
    assert sent and traces(model) == [] and not _rebound
    handle = speed_up(model, scheduler=scheduler)
    with interrupted_at(Place("hosts/diffusers/dispatch.py", "unbind")) as sent, pytest.raises(KeyboardInterrupt):
        handle.remove()
    assert sent and traces(model) == [] and not _rebound


def test_context_manager_removes_after_an_exception(tiny, scheduler, speed_up):
    model, _ = tiny.build("wan")
    with pytest.raises(ZeroDivisionError), speed_up(model, scheduler=scheduler):
        raise ZeroDivisionError
    assert traces(model) == []


def test_apply_twice_is_an_error_or_replaces(tiny, scheduler, speed_up):
    model, _ = tiny.build("wan")
    first = speed_up(model, scheduler=scheduler)
    with pytest.raises(IntegrationError, match=r"accelerated already.*replace=True"):
        speed_up(model, scheduler=scheduler)
    second = speed_up(model, 0.5, scheduler=scheduler, replace=True)
    assert not first.active and second.active
    assert attached(model).attachments == second.attachments
    second.remove()
    assert attached(model) is None and traces(model) == []


def test_the_handle_can_be_found_again(tiny, scheduler, speed_up):
    model, _ = tiny.build("wan")
    speed_up(model, scheduler=scheduler)
    attached(model).remove()
    assert traces(model) == []


def test_two_models_share_a_module_and_do_not_mix(tiny, scheduler, denoise, speed_up):
    (one, inputs), (two, _) = tiny.build("wan"), tiny.build("wan")
    alone = speed_up(one, scheduler=scheduler)
    expected = denoise(one, inputs, scheduler)
    alone.remove()
    first, second = speed_up(one, scheduler=scheduler), speed_up(two, 0.5, scheduler=scheduler)
    outputs = []
    scheduler.set_timesteps(4)
    with torch.no_grad():
        for step in range(4):
            for branch in ("cond", "uncond"):
                with one.cache_context(branch), two.cache_context(branch):
                    outputs.append(one(**inputs)[0])
                    two(**inputs)
            scheduler.step_index = step + 1
    assert torch.equal(torch.stack(outputs), expected)
    assert counts(first) == counts(second) == [(6, 4, {"first steps": 2})] * 2
    first.remove()
    assert sys.modules[WAN].dispatch_attention_fn.__name__ == "tagged_dispatch"  # the second still needs it
    denoise(two, inputs, scheduler)
    second.remove()
    assert sys.modules[WAN].dispatch_attention_fn.__name__ == "dispatch_attention_fn"


def test_two_pipelines_in_two_threads(pipes, speed_up):
    tinies = [pipes.wan(), pipes.wan()]
    handles = [speed_up(tiny.pipe, density) for tiny, density in zip(tinies, (0.22, 0.5), strict=True)]
    alone = [tiny(3) for tiny in tinies]
    for handle in handles:
        handle.clear()
    results: dict[int, torch.Tensor] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: tinies[i](3)})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[i], alone[i]) for i in range(2))
    assert [counts(handle) for handle in handles] == [[(4, 2, {"first steps": 2})] * 2] * 2


def test_an_exception_in_the_middle_leaves_nothing_behind(pipes, speed_up):
    tiny = pipes.wan()
    handle = speed_up(tiny.pipe)
    expected = tiny(4)

    handle.clear()

    def run_out(*_):
        if handle.report().total.sparse > 5:
            raise MemoryError

    broken = tiny.pipe.transformer.blocks[1].ffn.register_forward_hook(run_out)
    with pytest.raises(MemoryError):
        tiny(4)
    broken.remove()
    assert not handle.attachments[0].host.warm
    with pytest.raises(KeyboardInterrupt):  # between two forward passes
        tiny(4, callback_on_step_end=lambda *_: _raise(KeyboardInterrupt()))
    handle.clear()
    assert torch.equal(tiny(4), expected)
    assert counts(handle) == [(6, 4, {"first steps": 2})] * 2


def test_a_pipeline_cancelled_many_times(pipes, speed_up):
    tiny = pipes.wan()
    dense = tiny(3)
    handle = speed_up(tiny.pipe)
    expected = tiny(3)
    for number in range(50):
        at = number % 3

        def cancel(_, step, *__, at=at):
            return _raise(KeyboardInterrupt()) if step == at else {}

        with pytest.raises(KeyboardInterrupt):
            tiny(3, callback_on_step_end=cancel)
    assert torch.equal(tiny(3), expected)
    handle.remove()
    assert torch.equal(tiny(3), dense)


def test_an_exception_inside_the_operator_drops_its_centres(tiny, scheduler, denoise, one_pass, speed_up, monkeypatch):
    model, inputs = tiny.build("cosmos 2.5")
    handle = speed_up(model, scheduler=scheduler)
    expected = denoise(model, inputs, scheduler)
    host = handle.attachments[0].host
    assert host.warm
    monkeypatch.setattr("residua.baselines.own.attention", lambda *_, **__: _raise(MemoryError()))
    with torch.no_grad(), pytest.raises(MemoryError):
        one_pass(model, inputs)
    assert not host.warm
    monkeypatch.undo()
    assert torch.equal(denoise(model, inputs, scheduler), expected)


def test_a_missing_backend_is_refused_in_the_first_dense_step(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("wan")
    dense = denoise(model, inputs, scheduler)
    with (
        pytest.raises(BackendError, match="'no-such' is not known"),
        speed_up(model, scheduler=scheduler, config=Config(backend="no-such")),
    ):
        denoise(model, inputs, scheduler)
    assert torch.equal(denoise(model, inputs, scheduler), dense)


def _raise(error):
    raise error


def test_the_centres_are_gone_after_a_run(pipes, speed_up):
    tiny = pipes.wan()
    handle = speed_up(tiny.pipe)
    tiny(3)
    assert not handle.attachments[0].host.warm


@pytest.mark.parametrize("name", ["wan", "cosmos 2.5", "mochi", "hunyuan 1.5"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_plain_model(name, how, tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build(name)
    dense = denoise(model, inputs, scheduler)
    handle = speed_up(model, scheduler=scheduler)
    sparse = denoise(model, inputs, scheduler)
    before = counts(handle)
    twin = how(model)
    assert attached(twin) is None
    assert torch.equal(denoise(twin, inputs, scheduler), dense)
    assert counts(handle) == before
    with speed_up(twin, scheduler=scheduler) as other:
        assert torch.equal(denoise(twin, inputs, scheduler), sparse)
        assert counts(handle) == before and counts(other) == before
    assert torch.equal(denoise(twin, inputs, scheduler), dense)


def test_save_and_load(tiny, scheduler, denoise, speed_up, tmp_path):
    model, inputs = tiny.build("wan")
    dense = denoise(model, inputs, scheduler)
    speed_up(model, scheduler=scheduler)
    weights = model.state_dict()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    again = loaded.state_dict()
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    assert attached(loaded) is None and traces(loaded) == []
    # Weights mapped from the file are aligned differently, which rounds differently with or without Residua.
    for weight in loaded.parameters():
        weight.data = weight.data.clone()
    assert torch.equal(denoise(loaded, inputs, scheduler), dense)


def test_half_a_pipeline_is_never_accelerated(pipes):
    tiny = pipes.wan22_i2v()
    tiny.pipe.transformer_2.blocks[0].attn1.set_processor(OddProcessor())
    with pytest.raises(IntegrationError, match=r"blocks\.0\.attn1: its attention processor is OddProcessor"):
        accelerate(tiny.pipe)
    assert traces(tiny.pipe.transformer) == [] and not _rebound


class OddProcessor:
    _attention_backend = None

    def __call__(self, attn, hidden_states, *_, **__):
        return hidden_states


def test_a_foreign_processor_set_later_is_an_error(tiny, scheduler, one_pass, speed_up):
    model, inputs = tiny.build("wan")
    speed_up(model, scheduler=scheduler)
    model.blocks[1].attn1.set_processor(OddProcessor())
    with torch.no_grad(), pytest.raises(IntegrationError, match="OddProcessor, wanted WanAttnProcessor"):
        one_pass(model, inputs)


def test_one_processor_shared_by_all_layers(tiny, scheduler, denoise, speed_up):
    """Cross-attention included: it must stay dense."""
    model, inputs = tiny.build("wan")
    handle = speed_up(model, scheduler=scheduler)
    expected = denoise(model, inputs, scheduler)
    handle.remove()
    shared = type(model.blocks[0].attn1.processor)()
    model.set_attn_processor(shared)
    handle = speed_up(model, scheduler=scheduler)
    assert torch.equal(denoise(model, inputs, scheduler), expected)
    assert counts(handle) == [(6, 4, {"first steps": 2})] * 2
    assert not isinstance(model.blocks[0].attn2.processor._attention_backend, LayerTag)
    handle.remove()
    assert model.blocks[0].attn1.processor is shared


def test_a_replaced_transformer_is_remarked(pipes, speed_up):
    tiny = pipes.wan()
    handle = speed_up(tiny.pipe)
    tiny.pipe.transformer = pipes.wan().pipe.transformer
    assert "was replaced and runs dense" in str(handle.report())
