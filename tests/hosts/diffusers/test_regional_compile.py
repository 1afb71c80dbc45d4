"""torch.compile of the repeated blocks: as many graphs as without Residua, and the same numbers as eager."""

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

pytestmark = pytest.mark.slow

LAYERS = 9  # more than the 8 recompilations that torch allows: one graph per layer would fail


class Counting:
    """A compiler that counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return lookup_backend("aot_eager")(module, inputs)


def compiled_graphs(model) -> Counting:
    torch._dynamo.reset()
    if not getattr(model, "_repeated_blocks", None):  # Cosmos-Predict2.5 names none
        model._repeated_blocks = [type(model.transformer_blocks[0]).__name__]
    counting = Counting()
    model.compile_repeated_blocks(backend=counting, fullgraph=True)
    return counting


def build(tiny, name):
    deep = {
        "wan": lambda: tiny.wan(layers=LAYERS),
        "hunyuan": lambda: tiny.hunyuan(layers=LAYERS, single=2),
        "cosmos 2.5": lambda: tiny.cosmos25(layers=LAYERS),
    }
    tiny.build(name)  # skips where diffusers is too old
    with torch.random.fork_rng():
        return tiny.settled(deep[name]())


@pytest.mark.parametrize("name", ["wan", "hunyuan", "cosmos 2.5"])
def test_graph_count_equals_dense(name, tiny, scheduler, denoise, speed_up):
    model, inputs = build(tiny, name)
    dense = compiled_graphs(model)
    denoise(model, inputs, scheduler, 2)
    model, inputs = build(tiny, name)
    handle = speed_up(model, scheduler=scheduler)
    eager = denoise(model, inputs, scheduler, 3)
    wanted = [(layer.sparse, layer.warm, layer.dense) for layer in handle.report().transformers[0].layers]
    handle.clear()
    sparse = compiled_graphs(model)
    out = denoise(model, inputs, scheduler, 3)
    assert sparse.graphs == dense.graphs > 0
    assert torch.allclose(out, eager, atol=2e-5)
    assert [(layer.sparse, layer.warm, layer.dense) for layer in handle.report().transformers[0].layers] == wanted


def test_removal_from_a_compiled_model(tiny, scheduler, denoise, speed_up):
    with torch.random.fork_rng():
        model, inputs = tiny.settled(tiny.wan(layers=2))
    compiled_graphs(model)
    dense = denoise(model, inputs, scheduler, 2)
    handle = speed_up(model, scheduler=scheduler)
    assert not torch.equal(denoise(model, inputs, scheduler, 2), dense)
    handle.remove()
    assert torch.equal(denoise(model, inputs, scheduler, 2), dense)
    assert handle.report().total.sparse == 4


def test_the_operator_is_well_formed(tiny, scheduler, speed_up):
    """torch's own checks of schema, fake implementation and dispatch."""
    from residua.hosts.diffusers.dispatch import attention_op

    model, _ = tiny.build("wan")
    handle = speed_up(model, scheduler=scheduler, dense_steps=0)
    attachment = handle.attachments[0]
    attachment.tracker.advance(torch.tensor([1]))
    attachment.now.video = tiny.VIDEO
    q, k, v = (tiny.noise(1, tiny.VIDEO, 2, 12 + i)[..., :12] for i in range(3))
    tag = model.blocks[0].attn1.processor._attention_backend
    checks = ("test_schema", "test_faketensor")
    for mask in (None, torch.ones(1, 1, 1, tiny.VIDEO, dtype=torch.bool)):
        torch.library.opcheck(attention_op, (q, k, v, tag.number, mask, None, False), test_utils=checks)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_the_whole_transformer_as_one_graph(how, tiny, scheduler, denoise, speed_up):
    """torch runs the hooks of the outermost module outside of the graph."""
    with torch.random.fork_rng():
        model, inputs = tiny.settled(tiny.wan(layers=2))
    handle = speed_up(model, scheduler=scheduler)
    eager = denoise(model, inputs, scheduler, 3)
    handle.clear()
    torch._dynamo.reset()
    counting = Counting()
    if how == "wrapped":
        compiled = torch.compile(model, backend=counting, fullgraph=True)
    else:
        model.compile(backend=counting, fullgraph=True)
        compiled = model
    assert torch.allclose(denoise(compiled, inputs, scheduler, 3), eager, atol=2e-5)
    assert counting.graphs == 1 and handle.report().total.sparse == 8
