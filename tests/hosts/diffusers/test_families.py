"""Every family on a tiny random model: the same as dense at density 1, as configured below it, and gone
after."""

import inspect

import pytest
import torch

from residua import IntegrationError

NAMES = [
    "wan", "wan i2v", "wan ti2v", "wan vace", "skyreels", "hunyuan", "hunyuan i2v", "hunyuan 1.5",
    "cosmos 2.5", "cosmos 3", "cogvideox", "ltx", "ltx 2", "mochi", "chronoedit", "wan animate", "consisid",
    "motif", "framepack", "flux", "flux 2", "qwen image", "minimax h3",
    "kandinsky 5", "kandinsky 6", "helios", "anyflow", "z image", "sd3.5", "allegro", "easyanimate",
    "ltx 2.3", "ltx 2.5", "lucy", "hunyuan skyreels",
]  # fmt: skip
# Where it is not that of a small video.
GRIDS = {
    "flux": (1, 1, 192),
    "flux 2": (1, 1, 192),
    "qwen image": (1, 1, 192),
    "z image": (1, 12, 16),
    "sd3.5": (1, 12, 16),
}
HISTORY = {"framepack": 128 + 16 + 16, "helios": 64 + 16 + 4}  # tokens of older frames, which count as video
# What is not video: text queries and text keys of one call.
TEXT = {
    "hunyuan": (8, 8),
    "hunyuan i2v": (8, 8),
    "hunyuan skyreels": (8, 8),
    "hunyuan 1.5": (13, 13),
    "cosmos 3": (0, 7),
    "cogvideox": (8, 8),
    "mochi": (6, 6),
    "consisid": (8, 8),
    "motif": (8, 8),
    "framepack": (8, 8),  # 3 of the image, 5 valid ones of the text
    "flux": (8, 8),
    "flux 2": (8, 8),
    "qwen image": (8, 8),
    "minimax h3": (30, 30),  # text, reference, audio
    "z image": (64, 64),  # filled up to a multiple of 32
    "sd3.5": (8, 8),
    "easyanimate": (8, 8),
}
NO_TEXT = ("noise_refiner", "attn2")  # layers of these models that see the image alone


@pytest.mark.parametrize("name", NAMES)
def test_density_one_is_dense_and_removal_is_exact(name, tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build(name)
    dense = denoise(model, inputs, scheduler)
    with speed_up(model, 1.0, scheduler=scheduler) as handle:
        same = denoise(model, inputs, scheduler)
        report = handle.report()
    assert report.total.sparse > 0
    assert (same - dense).abs().max() <= 2e-5 * dense.abs().max()
    assert torch.equal(denoise(model, inputs, scheduler), dense)


@pytest.mark.parametrize("name", NAMES)
def test_sparse_calls_and_density_are_as_configured(name, tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build(name)
    dense = denoise(model, inputs, scheduler)
    handle = speed_up(model, 0.22, scheduler=scheduler)
    out = denoise(model, inputs, scheduler)
    report = handle.report()
    [transformer] = report.transformers
    assert transformer.grids == [GRIDS.get(name, (3, 8, 8))]
    for layer in transformer.layers:
        no_text = any(part in layer.name for part in NO_TEXT)
        text_q, text_k = (0, 0) if no_text else TEXT.get(name, (0, 0))
        assert (layer.sparse, layer.warm) == (6, 4)  # 3 sparse steps x 2 branches, cold once per branch
        assert layer.dense == {"first steps": 2, **({"text pathway": 8} if name == "cosmos 3" else {})}
        assert layer.density == layer.pairs["total"] / layer.pairs["possible"]
        tokens = tiny.VIDEO + HISTORY.get(name, 0)
        video = {"q": tokens + text_q, "k": tokens + text_k}
        assert {(shape["q"][2], shape["k"][2]) for shape in layer.shapes} >= {(video["q"], video["k"])}
        assert (layer.pairs["pinned"] > 0, layer.pairs["exact"] > 0) == (text_k > 0, text_q > 0)
        assert layer.error is not None and layer.error > 0
        # Beyond the budget come only exact text rows.
        assert layer.density <= 0.22 + text_q / video["q"] + 1e-9
    assert torch.isfinite(out).all()
    assert not torch.equal(out, dense)


def test_causal_text_pathway_of_cosmos3_stays_exact(tiny, scheduler, denoise, speed_up):
    """Grouped K/V heads: 4 query heads on 2; video keys begin after the text keys."""
    model, inputs = tiny.build("cosmos 3")
    handle = speed_up(model, 0.22, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    shapes = handle.report().total.shapes
    assert {(tuple(s["q"]), tuple(s["k"])) for s in shapes} == {
        ((1, 4, 7, 16), (1, 2, 7, 16)),
        ((1, 4, 192, 16), (1, 2, 199, 16)),
    }
    layer = handle.attachments[0].layers[0]
    site = layer.site(192, 199)
    assert (site.text_queries, site.text_keys) == ((), ((0, 7),))
    site = layer.site(195, 202)  # three sound tokens after the video
    assert (site.text_queries, site.text_keys) == (((192, 195),), ((0, 7), (199, 202)))


def test_hunyuan15_never_builds_the_square_mask(tiny, scheduler, denoise, speed_up, monkeypatch):
    model, inputs = tiny.build("hunyuan 1.5")
    seen = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(*tensors, attn_mask=None, **rest):
        seen.append(None if attn_mask is None else tuple(attn_mask.shape))
        return sdpa(*tensors, attn_mask=attn_mask, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    denoise(model, inputs, scheduler, 1)
    assert (1, 1, 205, 205) in seen  # diffusers alone does
    seen.clear()
    speed_up(model, 0.22, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    assert (1, 1, 1, 205) in seen and (1, 1, 205, 205) not in seen


def test_padded_text_changes_nothing(tiny, scheduler, denoise, speed_up):
    """Different values behind the mask: the same video."""
    model, inputs = tiny.build("hunyuan")
    changed = inputs["encoder_hidden_states"].clone()
    changed[:, 5:] = 7.0
    speed_up(model, 0.22, scheduler=scheduler)
    first = denoise(model, inputs, scheduler)
    second = denoise(model, {**inputs, "encoder_hidden_states": changed}, scheduler)
    assert torch.allclose(first, second, atol=1e-6)


@pytest.mark.parametrize(
    "name, samples, tokens, text",
    [("hunyuan", 1, 197, 5), ("hunyuan 1.5", 1, 198, 6), ("mochi", 2, 196, 4)],  # the longest text of the batch
)
def test_padded_text_is_not_billed(name, samples, tokens, text, tiny, scheduler, denoise, speed_up):
    """Only valid rows of text are computed exactly, of 8, 13 and 6."""
    model, inputs = tiny.build(name)
    with speed_up(model, 0.22, scheduler=scheduler) as handle:
        denoise(model, inputs, scheduler)
        total = handle.report().total
    heads = total.sparse * 2 * samples
    assert total.sparse == 12 and total.pairs["possible"] <= heads * tokens * tokens
    assert 0 < total.pairs["exact"] <= heads * text * tokens


def test_causal_blocks_of_skyreels_stay_dense_and_are_counted(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("skyreels")
    model._set_ar_attention(3)
    dense = denoise(model, inputs, scheduler)
    handle = speed_up(model, 0.22, scheduler=scheduler)
    assert torch.equal(denoise(model, inputs, scheduler), dense)
    total = handle.report().total
    assert total.sparse == 0
    assert total.dense == {"first steps": 4, "mask is not key padding": 12}


def test_control_blocks_of_vace_have_the_depth_of_their_main_block(tiny, scheduler, speed_up):
    model, _ = tiny.build("wan vace")
    handle = speed_up(model, scheduler=scheduler, dense_layers=1)
    first = [layer.name for layer in handle.attachments[0].layers if layer.depth == 0]
    assert sorted(first) == ["blocks.0.attn1", "vace_blocks.0.attn1"]


def test_video_tokens_that_do_not_fit_are_an_error(tiny, scheduler, speed_up, one_pass, monkeypatch):
    model, inputs = tiny.build("wan")
    handle = speed_up(model, scheduler=scheduler, dense_steps=0)
    monkeypatch.setattr(handle.attachments[0].family, "tokens", lambda *_: 500, raising=False)
    with torch.no_grad(), pytest.raises(IntegrationError, match="500 video tokens do not fit 192 queries"):
        one_pass(model, inputs)


@pytest.mark.parametrize("name", ["hunyuan", "hunyuan 1.5", "mochi"])
def test_padding_is_read_once_per_forward_pass(name, tiny, scheduler, denoise, speed_up, monkeypatch):
    from residua.hosts import padding

    read, ranges = [], padding._ranges
    monkeypatch.setattr(padding, "_ranges", lambda valid: read.append(1) or ranges(valid))
    model, inputs = tiny.build(name)
    handle = speed_up(model, 0.22, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    assert len(handle.attachments[0].layers) == 2 and handle.report().total.sparse == 12
    assert len(read) <= 6  # sparse forward passes


def test_dense_calls_of_mochi_work_with_a_backend_that_takes_no_mask(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("mochi")
    expected = denoise(model, inputs, scheduler)
    handle = speed_up(model, scheduler=scheduler, dense_steps=4)
    seen = []

    def no_mask(q, k, v, attn_mask=None, **more):
        assert attn_mask is None
        seen.append(q.shape)
        return dispatch(q, k, v, **more)

    from diffusers.models import attention_dispatch

    dispatch = attention_dispatch.dispatch_attention_fn
    attention_dispatch.dispatch_attention_fn = no_mask
    try:
        out = denoise(model, inputs, scheduler)
    finally:
        attention_dispatch.dispatch_attention_fn = dispatch
    assert seen and handle.report().total.sparse == 0
    assert (out - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_a_subclass_of_a_supported_model(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("wan")
    model.__class__ = type("Finetuned", (type(model),), {})
    handle = speed_up(model, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    assert handle.report().transformers[0].family == "Wan" and handle.report().total.sparse == 12


def test_a_model_wrapped_by_peft(tiny, scheduler, denoise, speed_up):
    peft = pytest.importorskip("peft")
    model, inputs = tiny.build("wan")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["to_q", "to_k"]))
    handle = speed_up(wrapped, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    assert handle.report().total.sparse == 12
    handle.remove()
    assert not model._forward_pre_hooks


def test_the_grid_of_ltx_with_conditions(tiny, scheduler, denoise, speed_up):
    """The conditioning pipeline gives coordinates instead of sizes."""
    model, inputs = tiny.build("ltx")
    for name in ("num_frames", "height", "width", "rope_interpolation_scale"):
        inputs.pop(name)
    axes = torch.meshgrid(torch.arange(3), torch.arange(8), torch.arange(8), indexing="ij")
    inputs["video_coords"] = torch.stack([axis.flatten() for axis in axes]).float()[None].expand(2, -1, -1)
    handle = speed_up(model, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    assert handle.report().transformers[0].grids == [(3, 8, 8)]


def test_the_nabla_masks_of_kandinsky_stay_dense_and_are_counted(tiny, scheduler, denoise, speed_up):
    """They are block masks of flex attention: the model itself says what is computed."""
    model, inputs = tiny.build("kandinsky 5")
    model.set_attention_backend("flex")
    near = torch.eye(3).bool()[None, None]
    inputs["sparse_params"] = {"to_fractal": True, "sta_mask": near, "P": 0.5}
    masked = denoise(model, inputs, scheduler, 2)
    handle = speed_up(model, 0.22, scheduler=scheduler)
    assert torch.equal(denoise(model, inputs, scheduler, 2), masked)
    total = handle.report().total
    assert total.sparse == 0 and total.dense == {"block mask": 8}
    handle.remove()
    assert model.visual_transformer_blocks[0].self_attention.processor._attention_backend == "flex"


def test_masked_frames_of_allegro(tiny, scheduler, denoise, speed_up):
    """The model turns the mask into a bias; we turn it back into key padding."""
    model, inputs = tiny.build("allegro")
    unmasked = denoise(model, inputs, scheduler)
    inputs["attention_mask"] = torch.ones(1, 3, 16, 16)
    inputs["attention_mask"][:, 2] = 0
    dense = denoise(model, inputs, scheduler)
    handle = speed_up(model, 1.0, scheduler=scheduler)
    same = denoise(model, inputs, scheduler)
    assert handle.report().total.sparse == 12
    # Rows whose own key is masked are not defined.
    valid, largest = (Ellipsis, slice(0, 2), slice(None), slice(None)), dense.abs().max()
    assert (same - dense)[valid].abs().max() <= 2e-5 * largest < (unmasked - dense)[valid].abs().max()


def test_pictures_of_different_sizes_in_one_batch_of_z_image(tiny, scheduler, denoise, speed_up):
    """What the larger one has beyond the smaller is exact, like text."""
    model, inputs = tiny.build("z image")
    inputs["x"] = [inputs["x"][0], tiny.noise(4, 1, 32, 32)]
    dense = denoise(model, inputs, scheduler)
    with speed_up(model, 1.0, scheduler=scheduler) as handle:
        same = denoise(model, inputs, scheduler)
        assert handle.report().transformers[0].grids == [(1, 12, 16)]
        assert handle.report().total.sparse == 18
    assert (same - dense).abs().max() <= 2e-5 * dense.abs().max()


def test_lists_of_pictures_for_z_image_are_refused(tiny, scheduler, speed_up):
    model, inputs = tiny.build("z image")
    speed_up(model, scheduler=scheduler)
    with torch.no_grad(), pytest.raises(IntegrationError, match="Omni"):
        model(**{**inputs, "x": [[picture] for picture in inputs["x"]]})


@pytest.mark.parametrize(
    ("pipeline", "model"),
    [
        ("LucyEditPipeline", "WanTransformer3DModel"),
        ("HunyuanSkyreelsImageToVideoPipeline", "HunyuanVideoTransformer3DModel"),
    ],
)
def test_pipelines_that_run_a_supported_class(pipeline, model, tiny):
    import diffusers

    from residua.tools import coverage

    tiny.need(pipeline)
    found = coverage._classes(
        inspect.signature(getattr(diffusers, pipeline).__init__).parameters["transformer"].annotation,
        getattr(diffusers, pipeline),
    )
    assert [kind.__name__ for kind in found] == [model]
