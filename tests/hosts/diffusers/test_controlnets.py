"""Models that run beside the transformer: ControlNets are attached like it, and nothing is silently dense."""

from types import SimpleNamespace

import diffusers
import pytest
import torch

VIDEO = 192


def flux(tiny):
    _, inputs = tiny.build("flux")
    model = diffusers.FluxControlNetModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=[4, 4, 8],
    )
    return model, {**inputs, "controlnet_cond": tiny.noise(1, VIDEO, 4)}


def qwen_image(tiny):
    _, inputs = tiny.build("qwen image")
    model = diffusers.QwenImageControlNetModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    return model, {**inputs, "controlnet_cond": tiny.noise(1, VIDEO, 16)}


def sd3(tiny, own_embedding=True):
    _, inputs = tiny.build("sd3.5")
    model = diffusers.SD3ControlNetModel(
        sample_size=32,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=16,
        use_pos_embed=own_embedding,
    )
    if not own_embedding:  # the transformer's goes before it
        inputs["hidden_states"] = tiny.noise(1, VIDEO, 32)
    return model, {**inputs, "controlnet_cond": tiny.noise(1, 4, 24, 32)}


def cosmos(tiny):
    model = diffusers.CosmosControlNetModel(
        n_controlnet_blocks=2,
        in_channels=6,
        latent_channels=7,
        model_channels=32,
        num_attention_heads=2,
        attention_head_dim=16,
        mlp_ratio=1.0,
        text_embed_dim=16,
        adaln_lora_dim=4,
        patch_size=(1, 2, 2),
        max_size=(4, 16, 16),
        rope_scale=(1.0, 1.0, 1.0),
    )
    return model, {
        "controls_latents": tiny.latents(1, 4),
        "latents": tiny.latents(1, 5),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": tiny.noise(1, 8, 16),
        "condition_mask": torch.ones(1, 1, 3, 16, 16),
        "padding_mask": torch.zeros(1, 1, 16, 16),
    }


BUILDERS = {
    "flux": (flux, "FluxControlNetModel"),
    "qwen image": (qwen_image, "QwenImageControlNetModel"),
    "sd3.5": (sd3, "SD3ControlNetModel"),
    "sd3.5 8b": (lambda tiny: sd3(tiny, own_embedding=False), "SD3ControlNetModel"),
    "cosmos": (cosmos, "CosmosControlNetModel"),
}


def build(name, tiny):
    builder, kind = BUILDERS[name]
    tiny.need(kind)
    with torch.random.fork_rng():
        return tiny.settled(builder(tiny))


@pytest.fixture(autouse=True)
def without_torchvision(monkeypatch):
    """The ControlNet of Cosmos resizes a mask with it."""

    def resize(x, size, interpolation):
        return torch.nn.functional.interpolate(x, size)

    stand_in = SimpleNamespace(
        functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )
    place = "diffusers.models.controlnets.controlnet_cosmos.transforms"
    if hasattr(diffusers, "CosmosControlNetModel"):
        monkeypatch.setattr(place, stand_in, raising=False)


@pytest.mark.parametrize("name", BUILDERS)
def test_density_one_is_dense_and_removal_is_exact(name, tiny, scheduler, denoise, speed_up):
    model, inputs = build(name, tiny)
    dense = denoise(model, inputs, scheduler)
    with speed_up(model, 1.0, scheduler=scheduler) as handle:
        same = denoise(model, inputs, scheduler)
        [report] = handle.report().transformers
    assert [(layer.sparse, layer.dense) for layer in report.layers] == [(6, {"first steps": 2})] * 2
    assert report.layers[0].shapes[0]["q"][2] in (VIDEO, VIDEO + 8)
    assert (same - dense).abs().max() <= 2e-5 * dense.abs().max() > 0
    assert torch.equal(denoise(model, inputs, scheduler), dense)


def test_several_controlnets_of_a_pipeline_are_attached_beside_its_transformer(tiny, speed_up):
    one, other = (build("flux", tiny)[0] for _ in range(2))
    pipe = pipeline(tiny, controlnet=diffusers.FluxMultiControlNetModel([one, other, one]))
    with speed_up(pipe) as handle:
        names = [item.name for item in handle.attachments]
        assert names == ["transformer", "controlnet.0", "controlnet.1"]
        assert "not counted" not in str(handle.report())


def test_a_controlnet_that_no_family_knows_is_named_in_the_report(tiny, speed_up):
    with speed_up(pipeline(tiny, controlnet=torch.nn.Linear(2, 2))) as handle:
        assert "controlnet (Linear) runs dense and is not counted" in str(handle.report())


def pipeline(tiny, **components):
    model, _ = tiny.build("flux")
    return SimpleNamespace(components={"transformer": model, **components}, transformer=model, scheduler=None)


def test_the_controlnet_of_z_image_runs_layers_of_the_transformer(tiny, scheduler, speed_up):
    """In its forward pass they stay dense: step, branch and size of the picture are known in their own
    transformer's pass alone."""
    tiny.need("ZImageControlNetModel")
    model, inputs = tiny.build("z image")
    with torch.random.fork_rng():
        made = diffusers.ZImageControlNetModel(
            control_layers_places=[0],
            control_refiner_layers_places=[0],
            control_in_dim=4,
            dim=32,
            add_control_noise_refiner="control_noise_refiner",
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
        )
        control = diffusers.ZImageControlNetModel.from_transformer(tiny.settled((made, {}))[0], model)

    def denoise(rows=24, steps=4):
        scheduler.set_timesteps(steps)
        pictures = [picture[:, :, :rows] for picture in inputs["x"]]
        outputs = []
        for step in range(steps):
            with torch.no_grad():
                hints = control(pictures, inputs["t"], inputs["cap_feats"], pictures)
                out = model(
                    pictures, inputs["t"], inputs["cap_feats"], controlnet_block_samples=hints, return_dict=False
                )[0]
            outputs.append(torch.stack(out))
            scheduler.step_index = step + 1
        return torch.stack(outputs)

    dense = denoise()
    pipe = SimpleNamespace(components={"transformer": model, "controlnet": control}, scheduler=scheduler)
    with speed_up(pipe, 1.0) as handle:
        assert (denoise() - dense).abs().max() <= 2e-5 * dense.abs().max()
        first, second = handle.report(full=True).transformers
        denoise(rows=16)  # smaller than what the transformer's last pass saw
    assert (first.runs, second.runs) == (1, 1)
    assert {row.name: (row.sparse, row.dense) for row in first.layers + second.layers} == {
        "noise_refiner.0.attention": (3, {"first steps": 1, "in another model's forward pass": 4}),
        "layers.0.attention": (3, {"first steps": 1}),
        "layers.1.attention": (3, {"first steps": 1}),
        "control_layers.0.attention": (3, {"first steps": 1}),
        "control_noise_refiner.0.attention": (3, {"first steps": 1}),
    }
    assert torch.equal(denoise(), dense)
