"""Models that no family knows: what their calls show is enough, or they stay dense and say why."""

from types import SimpleNamespace

import pytest
import torch

from residua import Config, InputError, IntegrationError, accelerate
from residua.hosts.diffusers import Report, attached
from residua.hosts.diffusers.families import base
from residua.hosts.diffusers.families.generic import Generic

BOUND = Config(
    query_groups=8,
    kv_groups=24,
    probes=6,
    kmeans_cold=4,
    metric_rows=64,
    key_rank=8,
    query_rank=8,
    density=0.4,
    max_error=0.9,
)
FREELY = {"config": BOUND, "dense_steps": 1, "dense_layers": 0, "min_tokens": 0, "generic": True}


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(base.FAMILIES, "data", {})


def run(model, inputs, scheduler, denoise, **changes) -> tuple[torch.Tensor, Report]:
    with accelerate(model, scheduler=scheduler, **{**FREELY, **changes}) as handle:
        return denoise(model, inputs, scheduler), handle.report()


@pytest.mark.parametrize("name", ["flux", "flux 2", "qwen image", "wan", "hunyuan", "motif", "skyreels"])
def test_a_bound_that_cannot_be_kept_is_dense_and_removal_is_exact(name, tiny, scheduler, denoise):
    model, inputs = tiny.build(name)
    dense = denoise(model, inputs, scheduler)
    same, report = run(model, inputs, scheduler, denoise, config=BOUND.replace(max_error=1e-9))
    assert report.total.sparse > 0 and report.transformers[0].family == "generic"
    assert (same - dense).abs().max() <= 2e-5 * dense.abs().max()
    assert torch.equal(denoise(model, inputs, scheduler), dense)


def test_text_is_exact_at_both_ends(tiny, scheduler, denoise):
    model, inputs = tiny.build("flux")
    out, report = run(model, inputs, scheduler, denoise)
    assert report.total.sparse == 12 and report.total.dense == {"first steps": 4}
    pairs = report.total.pairs
    assert pairs["exact"] == 12 * 2 * 16 * 200  # calls, heads, rows at both ends, keys
    assert torch.isfinite(out).all() and report.transformers[0].grids == []


def test_cross_attention_stays_dense_with_its_reason(tiny, scheduler, denoise):
    model, inputs = tiny.build("wan")
    _, report = run(model, inputs, scheduler, denoise)
    rows = {row.name: (row.sparse, row.dense) for row in report.transformers[0].layers}
    assert rows["blocks.0.attn1"] == (6, {"first steps": 2})
    assert rows["blocks.0.attn2"] == (0, {"not self-attention": 8})


def test_masks_that_are_more_than_key_padding_stay_dense(tiny, scheduler, denoise):
    model, inputs = tiny.build("skyreels")
    model._set_ar_attention(3)
    dense = denoise(model, inputs, scheduler)
    out, report = run(model, inputs, scheduler, denoise)
    assert torch.equal(out, dense)
    assert report.total.dense["mask is not key padding"] == 12


def test_what_no_backend_takes_stays_dense(tiny, scheduler, denoise):
    model, inputs = tiny.build("flux")
    dense = denoise(model, inputs, scheduler)
    out, report = run(model, inputs, scheduler, denoise, config=BOUND.replace(backend="no-such"))
    assert torch.equal(out, dense) and report.total.dense == {"not supported": 16}


def test_an_error_bound_is_required(tiny):
    model, _ = tiny.build("flux")
    with pytest.raises(InputError, match="FluxTransformer2DModel, which no family knows: wanted an error bound"):
        accelerate(model, density=0.2, generic=True)
    accelerate(model, quality="faithful", generic=True).remove()


@pytest.mark.parametrize("name", ["cogvideox", "mochi"])
def test_models_that_call_torch_directly_are_refused(name, tiny):
    model, _ = tiny.build(name)
    with pytest.raises(IntegrationError, match="none of its attention goes through the dispatcher"):
        accelerate(model, quality="faithful", generic=True)
    assert not model._forward_pre_hooks and not hasattr(model, "_residua")


def test_without_generic_an_unknown_model_is_refused(tiny):
    model, _ = tiny.build("flux")
    with pytest.raises(IntegrationError, match="is not a transformer that Residua knows"):
        accelerate(model, quality="faithful")


def test_known_models_keep_their_family(tiny, scheduler, monkeypatch):
    monkeypatch.undo()
    model, _ = tiny.build("wan")
    with accelerate(model, scheduler=scheduler, generic=True) as handle:
        assert handle.report().transformers[0].family == "Wan"


def test_a_model_with_block_masks_of_its_own_is_refused(tiny):
    import diffusers

    tiny.need("AnyFlowFARTransformer3DModel")
    with torch.device("meta"):
        model = diffusers.AnyFlowFARTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1
        )
    with pytest.raises(IntegrationError, match="block masks of its own"):
        accelerate(model, steps=4, **FREELY)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"encoder_hidden_states": torch.zeros(2, 8, 16)}, 8),
        ({"encoder_hidden_states": [torch.zeros(5, 16), torch.zeros(3, 16)]}, 8),
        ({"encoder_hidden_states": torch.zeros(2, 8, 3, 16)}, 8),  # Krea 2: the layers of its text encoder
        ({"encoder_hidden_states": torch.zeros(2, 3, 8, 16)}, 8),  # Bria Fibo 2
        ({"encoder_hidden_states": torch.zeros(2, 8, 16), "encoder_hidden_states_2": torch.zeros(2, 4, 16)}, 12),
        ({"text_bth": torch.zeros(2, 8, 16)}, 8),  # Ernie-Image
        ({}, 0),
    ],
)
def test_how_many_tokens_are_text(inputs, text):
    assert Generic().layout(None, inputs) == text


def test_a_second_transformer_of_the_same_kind_is_attached_too(tiny, scheduler):
    """Ideogram 4 has one for the unconditional branch."""
    parts = {name: tiny.build("flux")[0] for name in ("transformer", "unconditional_transformer")}
    pipe = SimpleNamespace(components=parts, scheduler=scheduler)
    with accelerate(pipe, **FREELY) as handle:
        assert [item.name for item in handle.attachments] == list(parts)
        assert [item.name for item in attached(pipe).attachments] == list(parts)
