"""A miniature image-to-video diffusion transformer that ships with the package.

The architecture is Wan's (diffusers' `WanTransformer3DModel`), small enough for two CPU cores: dense and
sparse attention can be compared on something trained, without a download. See MODEL_CARD.md beside this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .pipeline import MiniVideoPipeline

__all__ = ["WEIGHTS", "load_pipeline"]

WEIGHTS = Path(__file__).parent / "weights"


def load_pipeline(
    folder: str | Path = WEIGHTS, torch_dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> MiniVideoPipeline:
    """The pipeline with the shipped weights (or another folder's), in float32 unless told otherwise."""
    try:
        import diffusers  # noqa: F401
    except ImportError as error:
        raise ImportError("residua.mini needs diffusers; pip install residua[diffusers]") from error
    from .pipeline import MiniVideoPipeline

    if not (Path(folder) / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{folder}: no model_index.json; wanted a folder as written by python -m residua.mini.train"
        )
    options = {} if torch_dtype is None else {"torch_dtype": torch_dtype}
    pipeline: MiniVideoPipeline = MiniVideoPipeline.from_pretrained(
        str(folder), local_files_only=True, **options
    )
    return pipeline.to(device)
