"""The models that the cost model knows, and the paper's figures for them."""

from dataclasses import dataclass
from typing import Any

from .rows import read_rows


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's Table 1, the settings that give its dense FLOPs, and what we know about them."""

    size: tuple[int, int]  # width, height in pixels
    frames: int
    steps: int
    density: float  # realised
    dense_pflops: float
    sparse_pflops: float
    speedup: float
    assumption: str
    seconds: tuple[float, float] | None = None  # dense and sparse, on an H100


@dataclass(frozen=True)
class Architecture:
    """A video transformer, as far as its cost is concerned. All layers have the same matrix products."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int  # of the residual stream
    mlp: int  # hidden width of the feed-forward
    mlp_matrices: int  # 2, or 3 if it is gated
    text_tokens: int
    # Where the text is: "joint" among queries and keys of self-attention, "keys" in a causal stream of its
    # own whose keys the video sees too, "cross" in a cross-attention.
    text: str
    text_width: int  # input width of the keys and values of a cross-attention; otherwise unused
    in_channels: int
    out_channels: int
    patch: tuple[int, int, int]  # frames, height, width
    frame_compression: int  # of the VAE; 1 without one
    pixel_compression: int
    pads: bool = False  # an incomplete patch is padded; otherwise the video is cropped to whole patches
    passes: int = 2  # forward passes per step: 2 with classifier-free guidance
    transformers: int = 1  # 2: one runs the first steps, the other the rest
    steps: int = 50
    size: tuple[int, int] = (1280, 720)
    frames: int = 81
    density: float = 0.22
    dense_steps: float = 0.20  # a whole number is a count, a fraction a share, as in residua.accelerate
    dense_layers: float = 0.03
    parameters: float = 0.0  # of one transformer, in billions; 0: estimated from its matrices
    text_encoder: float = 0.0  # billions, of the largest one; 0: none, or not known
    others: float = 0.0  # billions: VAE, image encoder and further text encoders
    in_batch: int = 1  # passes of a step that run as one batch
    paper: PaperRow | None = None
    notes: tuple[str, ...] = ()


def _architecture(name: str, aliases: tuple[str, ...] = (), paper: Any = None, **fields: Any) -> Architecture:
    return Architecture(name, **fields, paper=PaperRow(**paper) if paper else None)


_ROWS = read_rows("models.toml")
MODELS = {name: _architecture(name, **row) for name, row in _ROWS.items()}
ALIASES = {alias: name for name, row in _ROWS.items() for alias in row.get("aliases", ())}
