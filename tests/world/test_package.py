"""What `import residua.world` needs, and what it says where diffusers is missing."""

import subprocess
import sys

import pytest
import torch

CODE = """
import sys
sys.modules["diffusers"] = None
import residua.world
try:
    residua.world.load_pipeline()
except ImportError as error:
    print(error)
"""


def test_a_missing_diffusers_is_named_with_the_way_out() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert "pip install residua[diffusers]" in result.stdout


def test_concentration_knows_uniform_attention_from_sharp() -> None:
    pytest.importorskip("diffusers")
    from diffusers import FlowMatchEulerDiscreteScheduler

    from residua.world.concentration import attention_concentration
    from residua.world.model import build_model
    from residua.world.pipeline import WorldPipeline

    model = build_model(torch.Generator().manual_seed(0), num_layers=2)
    with torch.no_grad():
        model.transformer.blocks[0].attn1.norm_q.weight.zero_()
        model.transformer.blocks[1].attn1.norm_q.weight.fill_(30.0)
    pipeline = WorldPipeline(model.transformer, FlowMatchEulerDiscreteScheduler(), model.prompt_table)
    shares = attention_concentration(pipeline, num_frames=2, size=32, queries=16)
    assert shares.shape == (3, 2, 2)
    assert (shares[:, 0] > 0.94).all()
    assert (shares[:, 1] < 0.2).all()
