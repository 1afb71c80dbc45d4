"""A small world model that ships with the package: balls that are thrown, fall, bounce and collide.

The architecture is Wan's (diffusers' `WanTransformer3DModel`), small enough for two CPU cores: dense and
sparse attention can be compared on a trained model without a download. See MODEL_CARD.md beside this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .pipeline import WorldPipeline

__all__ = ["WEIGHTS", "load_pipeline"]

WEIGHTS = Path(__file__).parent / "weights"


def load_pipeline(
    folder: str | Path = WEIGHTS, torch_dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> WorldPipeline:
    """The diffusers pipeline with the trained weights of a folder; `torch_dtype` None: float32."""
    try:
        import diffusers  # noqa: F401
    except ImportError as error:
        raise ImportError("residua.world needs diffusers; pip install residua[diffusers]") from error
    from .pipeline import WorldPipeline

    if not (Path(folder) / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{folder}: no model_index.json; wanted a folder as written by python -m dev.training.train"
        )
    options = {} if torch_dtype is None else {"torch_dtype": torch_dtype}
    # Safetensors only: a pickle can run any code.
    pipeline: WorldPipeline = WorldPipeline.from_pretrained(
        str(folder), local_files_only=True, use_safetensors=True, **options
    )
    return pipeline.to(device)
