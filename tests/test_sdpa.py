"""Torch's signature: the same answers where nothing is skipped, refusals of what it cannot do."""

import inspect

import pytest
import torch

import residua
from residua import Config, InputError, attention, sdpa
from tests.support.oracle import qkv, small

EXACT = small(density=1, backend="torch")
torch_sdpa = torch.nn.functional.scaled_dot_product_attention


def test_its_arguments_are_those_of_torch():
    names = list(inspect.signature(sdpa).parameters)
    assert names[:8] == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]


def test_without_skipping_it_is_torchs():
    q, k, v = qkv(2, 4, 4, 70, 90)
    assert torch.allclose(sdpa(q, k, v, config=EXACT), torch_sdpa(q, k, v), atol=1e-5)
    assert torch.allclose(sdpa(q, k, v, scale=0.3, config=EXACT), torch_sdpa(q, k, v, scale=0.3), atol=1e-5)
    q, k, v = qkv(2, 4, 2, 70, 90)
    wanted = torch_sdpa(q, k, v, enable_gqa=True)
    assert torch.allclose(sdpa(q, k, v, enable_gqa=True, config=EXACT), wanted, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 90), (2, 1, 1, 90), (1, 1, 1, 90)])
def test_key_padding(shape):
    q, k, v = qkv(2, 4, 4, 70, 90)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., 80:] = False
    wanted = torch_sdpa(q, k, v, attn_mask=mask.reshape(shape[0], 1, 1, 90))
    assert torch.allclose(sdpa(q, k, v, attn_mask=mask, config=EXACT), wanted, atol=1e-5)


def test_config_and_state_are_those_of_attention():
    q, k, v = qkv()
    state, other = residua.State(), residua.State()
    config = Config(density=0.5, backend="torch")
    for _ in range(2):
        wanted = attention(q, k, v, config, other)
        assert torch.equal(sdpa(q, k, v, config=config, state=state), wanted)
    assert state.warm


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dropout_p": 0.1}, "inference only"),
        ({"is_causal": True}, "not approximated"),
        ({"attn_mask": torch.zeros(2, 90)}, "wanted key padding"),
        ({"attn_mask": torch.ones(70, 90, dtype=torch.bool)}, "wanted key padding"),
        ({"attn_mask": torch.ones(2, 4, 70, 90, dtype=torch.bool)}, "wanted key padding"),
        ({"attn_mask": torch.ones(3, 90, dtype=torch.bool)}, "wanted key padding"),
    ],
)
def test_what_it_cannot_do_it_refuses(options, message):
    q, k, v = qkv(2, 4, 4, 70, 90)
    with pytest.raises(InputError, match=message):
        sdpa(q, k, v, **options)


def test_grouped_heads_are_asked_for():
    with pytest.raises(InputError, match="enable_gqa=True"):
        sdpa(*qkv(2, 4, 2, 70, 90))
