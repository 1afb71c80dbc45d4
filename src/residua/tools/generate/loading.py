"""Loads a pipeline from a name, a folder or the package, onto a device, in a precision, over several
processes."""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import InputError, IntegrationError

WORLD = "world"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OFFLOADS = ("none", "model", "sequential", "group")
MAX_INDEX_BYTES = 1 << 20


@dataclass(frozen=True)
class PipelinePlacement:
    """Where and how a pipeline runs. `auto` takes CUDA if there is a device, and bf16 on it."""

    device: str = "auto"
    dtype: str = "auto"
    offload: str = "none"

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise InputError(f"dtype={self.dtype!r}: wanted auto, {', '.join(DTYPES)}")
        if self.offload not in OFFLOADS:
            raise InputError(f"offload={self.offload!r}: wanted one of {', '.join(OFFLOADS)}")
        if self.offload != "none" and self.torch_device.type == "cpu":
            raise InputError(f"offload={self.offload!r} needs a GPU, and this runs on the CPU: leave it out")

    @property
    def torch_device(self) -> torch.device:
        if self.device != "auto":
            return _present(self.device)
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        return torch.float32 if self.torch_device.type == "cpu" else torch.bfloat16


def _present(name: str) -> torch.device:
    """The device of that name; refused if this machine does not have it."""
    wanted = "wanted auto, cpu, cuda or cuda:1"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device={name!r}: {wanted}") from None
    if device.type == "cpu":
        return device
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) < count:
            return device
        found = f"finds {count} CUDA device(s)" if count else "finds no CUDA device"
        raise InputError(
            f"device={name!r}: torch {torch.__version__} {found}; use --device cpu, or install a CUDA build "
            "of torch on a machine with an NVIDIA GPU"
        )
    if device.type == "mps" and torch.backends.mps.is_available():
        return device
    raise InputError(f"device={name!r}: not on this machine; {wanted}")


def load(model: str, placement: PipelinePlacement) -> Any:
    """Loads `world`, a folder in the layout of diffusers, or a name on the Hugging Face hub."""
    folder = Path(model)
    if model == WORLD or _class_name(folder) == "WorldPipeline":
        pipe = _load_world(None if model == WORLD else folder, placement)
    elif folder.is_dir() or not looks_like_a_path(model):
        pipe = _load_diffusers(model, placement)
    else:
        raise InputError(f"{model}: no such folder; wanted a folder with model_index.json, a hub id, or world")
    return _placed(pipe, placement)


def _load_world(folder: Path | None, placement: PipelinePlacement) -> Any:
    from ...hosts.diffusers.versions import require_diffusers
    from ...world import WEIGHTS, load_pipeline

    log = require_diffusers().utils.logging
    dtype = placement.torch_dtype
    log.disable_progress_bar()  # no bar for three small files
    try:
        return load_pipeline(WEIGHTS if folder is None else folder, None if dtype == torch.float32 else dtype)
    except (OSError, ValueError, ImportError) as error:
        raise IntegrationError(f"the model in the box cannot be loaded: {error}") from error
    finally:
        log.enable_progress_bar()


def _load_diffusers(model: str, placement: PipelinePlacement) -> Any:
    from ...hosts.diffusers.versions import require_diffusers

    diffusers = require_diffusers()
    try:
        with warnings.catch_warnings():
            # diffusers warns about torch_dtype, but the older supported versions do not know its new name.
            warnings.simplefilter("ignore", FutureWarning)
            # Safetensors only: a pickle can run any code.
            return diffusers.DiffusionPipeline.from_pretrained(
                model, torch_dtype=placement.torch_dtype, use_safetensors=True
            )
    # diffusers, the hub's client and the file readers raise many kinds of errors.
    except Exception as error:
        raise IntegrationError(
            f"{model} cannot be loaded ({type(error).__name__}: {_first_line(error)}). Without a network, "
            "download it elsewhere with `hf download <id> --local-dir <folder>` and give --model <folder>; "
            "with one, check the spelling and, for gated models, `hf auth login`. `--model world` needs none"
        ) from error


def _placed(pipe: Any, placement: PipelinePlacement) -> Any:
    device = placement.torch_device
    if placement.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif placement.offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    elif placement.offload == "group":
        pipe.enable_group_offload(
            onload_device=device, offload_device=torch.device("cpu"), offload_type="leaf_level", use_stream=True
        )
    else:
        pipe.to(device)
    return pipe


@contextmanager
def processes(device: torch.device) -> Iterator[tuple[int, int]]:
    """Rank and number of processes; joins the process group if torchrun started several."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield 0, 1
        return
    if device.type != "cuda":
        raise InputError(
            f"{world} processes on {device.type}: the context parallelism of diffusers needs a GPU for each; "
            "start one process without torchrun"
        )
    import torch.distributed as dist

    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    try:
        yield dist.get_rank(), world
    finally:
        dist.destroy_process_group()


def split_heads(pipe: Any, world: int) -> None:
    """Splits the heads over processes (Ulysses). Each process sees every token of its heads, so the result is
    the same."""
    if world == 1:
        return
    from diffusers import ContextParallelConfig

    for name in ("transformer", "transformer_2"):
        model = getattr(pipe, name, None)
        if model is not None:
            try:
                model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=world))
            except (ValueError, AttributeError, NotImplementedError) as error:
                raise IntegrationError(
                    f"{type(model).__name__} cannot run on {world} processes ({error}); start one process"
                ) from error


def _class_name(folder: Path) -> str | None:
    """The pipeline class that a local folder names in its model_index.json."""
    index = folder / "model_index.json"
    try:
        if not index.is_file() or index.stat().st_size > MAX_INDEX_BYTES:
            return None
        found = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("_class_name") if isinstance(found, dict) else None


def looks_like_a_path(model: str) -> bool:
    """Whether a model's name cannot be one of the hub, which are `owner/name`."""
    return model.startswith((".", "/", "~")) or model.count("/") != 1 or os.sep * 2 in model


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
