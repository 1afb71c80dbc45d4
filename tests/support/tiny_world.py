"""A pipeline of the world model with random weights, so small that a clip costs nothing."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

from residua.world.model import TRANSFORMER_CONFIG, PromptTable
from residua.world.pipeline import WorldPipeline

SMALL = {"num_layers": 2, "attention_head_dim": 32, "ffn_dim": 64}


def tiny_world() -> WorldPipeline:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        transformer, table = WanTransformer3DModel(**{**TRANSFORMER_CONFIG, **SMALL}), PromptTable()
    with torch.no_grad():
        for param in (*transformer.parameters(), *table.parameters()):
            param.copy_(0.1 * torch.randn(param.shape, generator=generator))
    return WorldPipeline(transformer.eval(), FlowMatchEulerDiscreteScheduler(shift=3.0), table)
