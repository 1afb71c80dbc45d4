"""Token subsets, prompt table and initialisation."""

import pytest
import torch

from residua.world import scenes
from residua.world.renderer import render_video

pytest.importorskip("diffusers")

from residua.world.model import (
    IN_CHANNELS,
    WORDS,
    PromptTable,
    WorldModel,
    build_model,
    condition_channels,
    forward_tokens,
    to_tokens,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def random_model() -> WorldModel:
    """Models whose zero-initialised branches do something."""
    generator = seeded()
    model = build_model(generator)
    for param in model.transformer.parameters():
        param.add_(torch.randn(param.shape, generator=generator), alpha=0.02)
    return model


@torch.no_grad()
def test_token_forward_equals_the_models_own() -> None:
    model = random_model()
    transformer, table = model.transformer, model.prompt_table
    generator = seeded(1)
    scene = scenes.random_scene(generator, 2)
    truth = render_video(scene, scenes.random_layout(scene, generator), 3, 16, 24)[None]
    noisy = torch.randn(truth.shape, generator=generator)
    video = torch.cat([noisy, condition_channels(truth[:, :, 0], 3)], dim=1)
    assert video.shape[1] == IN_CHANNELS
    context, timestep = table.encode([scene]), torch.tensor([700.0])
    full = transformer(video, timestep, context, return_dict=False)[0]
    tokens = forward_tokens(transformer, to_tokens(video), transformer.rope(video), timestep, context)
    torch.testing.assert_close(tokens, to_tokens(full), atol=2e-6, rtol=1e-5)


def test_prompt_table_tells_scenes_apart() -> None:
    table = build_model(seeded()).prompt_table
    one = scenes.parse_prompt("a red clay ball thrown left on a sand floor at noon")
    other = scenes.parse_prompt("a red clay ball thrown right on a sand floor at noon")
    context = table.encode([one, other, None])
    assert context.shape == (3, 4, 128)
    assert torch.equal(context[0, 0], context[1, 0])
    assert not torch.equal(context[0, 1], context[1, 1])
    assert torch.equal(context[2, 0], table.weight[WORDS.index("<null>")])
    assert isinstance(table, PromptTable)


def test_initialisation_is_seeded_and_knows_no_neighbours() -> None:
    first, second = build_model(seeded(3)).transformer, build_model(seeded(3)).transformer
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    for block in first.blocks:
        assert not block.attn1.to_q.bias.any()
        assert not block.attn1.to_k.bias.any()
