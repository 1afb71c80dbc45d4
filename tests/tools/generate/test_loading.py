"""Which pipeline a name means, and where it runs."""

import json
import os
import pickle
import shutil

import pytest
import torch

from residua.errors import InputError, IntegrationError
from residua.tools.generate import loading
from residua.tools.generate.loading import PipelinePlacement, load, processes, split_heads


def test_a_folder_of_the_world_model_is_recognised(weights):
    pipe = load(str(weights), PipelinePlacement(device="cpu", dtype="bf16"))
    assert type(pipe).__name__ == "WorldPipeline" and pipe.transformer.dtype == torch.bfloat16


def test_a_folder_without_a_model_is_a_clear_error(tmp_path):
    with pytest.raises(IntegrationError, match="cannot be loaded"):
        load(str(tmp_path), PipelinePlacement(device="cpu"))


def test_hostile_folders_are_refused(tmp_path):
    index = tmp_path / "model_index.json"
    for content in ("[" * 100_000, '{"_class_name": ["WorldPipeline"]}', '"WorldPipeline"', "{"):
        index.write_text(content)
        with pytest.raises(IntegrationError, match="cannot be loaded"):
            load(str(tmp_path), PipelinePlacement(device="cpu"))


def test_pickled_weights_are_not_opened(weights, tmp_path):
    """They would run code; this one leaves a file."""
    marker = tmp_path / "was-run"
    pickled = pickle.dumps(Running(f"touch {marker}"))
    world = tmp_path / "world"
    shutil.copytree(weights, world)
    for path in world.rglob("*.safetensors"):
        path.with_suffix(".bin").write_bytes(pickled)
        path.unlink()
    other = tmp_path / "other"
    (other / "unet").mkdir(parents=True)
    parts = {"unet": ["diffusers", "UNet2DModel"], "scheduler": ["diffusers", "DDPMScheduler"]}
    (other / "model_index.json").write_text(json.dumps({"_class_name": "DDPMPipeline", **parts}))
    (other / "unet" / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
    (other / "unet" / "diffusion_pytorch_model.bin").write_bytes(pickled)
    (other / "scheduler").mkdir()
    (other / "scheduler" / "scheduler_config.json").write_text("{}")
    for folder in (world, other):
        with pytest.raises(IntegrationError, match=r"cannot be loaded.*safetensors"):
            load(str(folder), PipelinePlacement(device="cpu"))
    assert not marker.exists()
    pickle.loads(pickled)
    assert marker.exists()


class Running:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_damaged_weights_are_a_clear_error(weights, tmp_path):
    for path in weights.rglob("*"):
        if path.is_file():
            target = tmp_path / path.relative_to(weights)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes()[:2000] if path.suffix == ".safetensors" else path.read_bytes())
    with pytest.raises(IntegrationError, match="cannot be loaded"):
        load(str(tmp_path), PipelinePlacement(device="cpu"))


def test_names_and_paths_are_told_apart(monkeypatch):
    asked = []
    monkeypatch.setattr(loading, "_load_diffusers", lambda model, placement: asked.append(model) or FakePipe())
    load("someone/model", PipelinePlacement(device="cpu"))
    assert asked == ["someone/model"]
    for path in ("./here", "/no/such", "~/x", "a/b/c", "model"):
        with pytest.raises(InputError, match="no such folder"):
            load(path, PipelinePlacement(device="cpu"))


class FakePipe:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **options: self.calls.append(name)


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_a_device_that_is_not_there_is_refused_at_once(monkeypatch, one_gpu):
    with pytest.raises(InputError, match=r"cuda:1.*finds 1 CUDA device"):
        _ = PipelinePlacement("cuda:1").torch_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"finds no CUDA device; use --device cpu"):
        _ = PipelinePlacement("cuda").torch_device
    for name in ("meta", "abacus"):
        with pytest.raises(InputError, match="wanted auto, cpu"):
            _ = PipelinePlacement(name).torch_device


@pytest.mark.parametrize(
    "offload, method",
    [
        ("none", "to"),
        ("model", "enable_model_cpu_offload"),
        ("sequential", "enable_sequential_cpu_offload"),
        ("group", "enable_group_offload"),
    ],
)
def test_offload(offload, method, monkeypatch, one_gpu):
    pipe = FakePipe()
    monkeypatch.setattr(loading, "_load_diffusers", lambda model, placement: pipe)
    assert load("someone/model", PipelinePlacement("cuda:0", "bf16", offload)) is pipe
    assert pipe.calls == [method]


def test_defaults_follow_the_device(one_gpu):
    assert PipelinePlacement(device="cpu").torch_dtype == torch.float32
    assert PipelinePlacement(device="cuda").torch_dtype == torch.bfloat16
    assert PipelinePlacement(device="cuda", dtype="fp16").torch_dtype == torch.float16


def test_one_process_needs_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with processes(torch.device("cpu")) as (rank, world):
        assert (rank, world) == (0, 1) and not torch.distributed.is_initialized()
    pipe = FakePipe()
    split_heads(pipe, 1)
    assert pipe.calls == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="needs a GPU for each"), processes(torch.device("cpu")):
        pass


def test_several_processes_split_the_heads(weights):
    pipe = load(str(weights), PipelinePlacement(device="cpu"))
    asked = []
    pipe.transformer.enable_parallelism = lambda config: asked.append(config.ulysses_degree)
    split_heads(pipe, 2)
    assert asked == [2]

    def refuse(config):
        raise ValueError("no plan")

    pipe.transformer.enable_parallelism = refuse
    with pytest.raises(IntegrationError, match="start one process"):
        split_heads(pipe, 2)


def test_the_index_names_the_pipeline(weights):
    assert json.loads((weights / "model_index.json").read_text())["_class_name"] == "WorldPipeline"
