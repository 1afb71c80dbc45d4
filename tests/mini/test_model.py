"""Token subsets, prompt table and initialisation."""

import pytest
import torch

from residua.mini import data

pytest.importorskip("diffusers")

from residua.mini.batches import BatchShape, choose_tokens, make_batch, token_coordinates
from residua.mini.model import (
    IN_CHANNELS,
    WORDS,
    MiniModel,
    PromptTable,
    build_model,
    condition_channels,
    forward_tokens,
    to_tokens,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def random_model() -> MiniModel:
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
    scene = data.random_scene(generator)
    truth = data.render_video(scene, data.random_layout(scene, generator), 3, 16, 24)[None]
    noisy = torch.randn(truth.shape, generator=generator)
    video = torch.cat([noisy, condition_channels(truth[:, :, 0], 3)], dim=1)
    assert video.shape[1] == IN_CHANNELS
    context, timestep = table.encode([scene]), torch.tensor([700.0])
    full = transformer(video, timestep, context, return_dict=False)[0]
    tokens = forward_tokens(transformer, to_tokens(video), transformer.rope(video), timestep, context)
    torch.testing.assert_close(tokens, to_tokens(full), atol=2e-6, rtol=1e-5)


def test_batch_of_all_tokens_equals_the_rendered_clip() -> None:
    transformer = build_model(seeded()).transformer
    shape = BatchShape(2, "all", num_frames=4, size=32)
    batch = make_batch(transformer, shape, seeded(5), shift=3.0, two_objects=0.5, drop_prompt=0.0)
    first = batch.clean[:, :64].view(2, 8, 8, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 32, 32)
    expected = to_tokens(condition_channels(first, 4))
    torch.testing.assert_close(batch.inputs()[:, :, 48:], expected)
    assert batch.inputs().shape == (2, 256, IN_CHANNELS * 16)


@pytest.mark.parametrize("num_frames", [8, 16, 17])
@pytest.mark.parametrize("cut", ["frames", "blocks", "near"])
def test_subsets_hold_tokens_of_the_first_frame_and_none_twice(num_frames: int, cut: str) -> None:
    shape = BatchShape(1, cut, 256 if cut != "near" else 96, num_frames=num_frames, size=32)
    for seed in range(20):
        scene = data.random_scene(seeded(seed))
        layout = data.random_layout(scene, seeded(seed))
        index = choose_tokens(shape, scene, layout, seeded(seed))
        assert len(index) == len(index.unique()) == shape.tokens
        assert (index < 64).sum() == (64 if cut != "near" else 48)
        assert torch.equal(index, index.sort().values)
        assert index[-1] < num_frames * 64


def test_near_tokens_are_mostly_near() -> None:
    shape = BatchShape(1, "near", 128)
    scene = data.random_scene(seeded())
    layout = data.random_layout(scene, seeded())
    index = choose_tokens(shape, scene, layout, seeded())
    x, y, time = (values[index].mean(1) for values in token_coordinates(32, 64))
    assert (data.object_distance(scene, layout, x, y, time) < 0.2).float().mean() > 0.6


def test_subset_rows_are_those_of_the_whole_clip() -> None:
    transformer = build_model(seeded()).transformer
    options = {"shift": 3.0, "two_objects": 0.0, "drop_prompt": 0.0}
    whole = make_batch(transformer, BatchShape(1, "all", num_frames=8, size=32), seeded(2), **options)
    part = make_batch(transformer, BatchShape(1, "near", 64, num_frames=8, size=32), seeded(2), **options)
    rows = {row.numpy().tobytes(): i for i, row in enumerate(whole.coordinates[0])}
    index = [rows[row.numpy().tobytes()] for row in part.coordinates[0]]
    assert torch.equal(part.clean[0], whole.clean[0, index])
    assert torch.equal(part.given[0], whole.given[0, index])
    for side in (0, 1):
        assert torch.equal(part.rope[side][0], whole.rope[side][0, index])


def test_prompt_table_tells_scenes_apart() -> None:
    table = build_model(seeded()).prompt_table
    one = data.parse_prompt("a red circle moving left on a grey background")
    other = data.parse_prompt("a red circle moving right on a grey background")
    context = table.encode([one, other, None])
    assert context.shape == (3, 3, 128)
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
