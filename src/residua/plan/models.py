"""The models as data: what a forward pass multiplies, how a video becomes tokens, what the paper reports.

Sources: the layer structure is that of diffusers' transformers; sizes are those of the released configs
(HunyuanVideo, Wan2.2-I2V-A14B, Cosmos-Predict2.5-14B, Cosmos3-Nano) and of `residua.mini.model`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """A row of the paper's Table 1, the settings that give its dense FLOPs, and what we know of them."""

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
    """A video transformer, as far as its cost goes. All layers are alike in what they multiply."""

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
    text_width: int  # what the keys and values of a cross-attention are projected from; else unused
    in_channels: int
    out_channels: int
    patch: tuple[int, int, int]  # frames, height, width
    frame_compression: int  # of the VAE; 1 without one
    pixel_compression: int
    pads: bool = False  # an incomplete patch is padded; otherwise the video is cropped to whole patches
    passes: int = 2  # forward passes per step: 2 with classifier-free guidance
    transformers: int = 1  # 2: one takes over from the other along the way
    steps: int = 50
    size: tuple[int, int] = (1280, 720)
    frames: int = 81
    density: float = 0.22
    dense_steps: float = 0.20  # a whole number counts, a fraction is a share, as in residua.accelerate
    dense_layers: float = 0.03
    reference: Reference | None = None
    notes: tuple[str, ...] = ()


HUNYUAN = Architecture(
    name="hunyuanvideo",
    layers=60,  # 20 double and 40 single blocks, which multiply the same
    heads=24,
    kv_heads=24,
    head_dim=128,
    width=3072,
    mlp=4 * 3072,
    mlp_matrices=2,
    text_tokens=256,
    text="joint",
    text_width=3072,
    in_channels=16,
    out_channels=16,
    patch=(1, 2, 2),
    frame_compression=4,
    pixel_compression=8,
    passes=1,
    frames=129,
    dense_steps=0.10,
    reference=Reference(
        size=(1280, 720),
        frames=129,
        steps=50,
        density=0.2192,
        dense_pflops=612.38,
        sparse_pflops=255.95,
        speedup=2.61,
        assumption="50 steps, one pass per step (guidance is distilled), 256 text tokens in the attention",
    ),
)

WAN = Architecture(
    name="wan2.2-i2v-a14b",
    layers=40,
    heads=40,
    kv_heads=40,
    head_dim=128,
    width=5120,
    mlp=13824,
    mlp_matrices=2,
    text_tokens=512,
    text="cross",
    text_width=5120,
    in_channels=36,
    out_channels=16,
    patch=(1, 2, 2),
    frame_compression=4,
    pixel_compression=8,
    transformers=2,
    steps=40,
    reference=Reference(
        size=(1280, 720),
        frames=81,
        steps=50,
        density=0.2197,
        dense_pflops=658.46,
        sparse_pflops=328.70,
        speedup=1.80,
        assumption="50 steps (the release's default is 40, which gives 522), two passes per step (guidance)",
        seconds=(1650.0, 917.0),
    ),
)

COSMOS25 = Architecture(
    name="cosmos-predict2.5-14b",
    layers=36,
    heads=40,
    kv_heads=40,
    head_dim=128,
    width=5120,
    mlp=4 * 5120,
    mlp_matrices=2,
    text_tokens=512,
    text="cross",
    text_width=1024,
    in_channels=18,  # latents, condition mask, padding mask
    out_channels=16,
    patch=(1, 2, 2),
    frame_compression=4,
    pixel_compression=8,
    steps=35,
    size=(1280, 704),
    frames=93,
    dense_steps=2,
    dense_layers=1,
    reference=Reference(
        size=(1280, 704),
        frames=93,
        steps=35,
        density=0.2214,
        dense_pflops=526.87,
        sparse_pflops=253.61,
        speedup=1.51,
        assumption="35 steps, two passes per step (guidance), 1280x704 and 93 frames (84,480 tokens)",
    ),
)

COSMOS3 = Architecture(
    name="cosmos3-nano-16b",
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    width=4096,
    mlp=12288,
    mlp_matrices=3,
    text_tokens=512,
    text="keys",
    text_width=4096,
    in_channels=48,
    out_channels=48,
    patch=(1, 2, 2),
    frame_compression=4,
    pixel_compression=16,
    pads=True,
    steps=35,
    frames=189,
    density=0.26,
    dense_steps=2,
    dense_layers=1,
    notes=("512 prompt tokens are assumed; the model takes any number",),
    reference=Reference(
        size=(1280, 720),
        frames=189,
        steps=25,
        density=0.2596,
        dense_pflops=90.01,
        sparse_pflops=43.22,
        speedup=1.48,
        assumption="50 passes: 25 steps with guidance, or 50 without. The release's default, 35 steps with "
        "guidance, gives 125. The paper's saving of 46.79 PFLOPs is more than all attention at its density "
        "can save, so the two columns of this row do not fit one architecture",
    ),
)

MINI = Architecture(
    name="mini",
    layers=6,
    heads=2,
    kv_heads=2,
    head_dim=128,
    width=256,
    mlp=768,
    mlp_matrices=2,
    text_tokens=3,
    text="cross",
    text_width=256,
    in_channels=28,
    out_channels=3,
    patch=(1, 4, 4),
    frame_compression=1,
    pixel_compression=1,
    passes=1,
    steps=20,
    size=(64, 64),
    frames=32,
)

MODELS = {model.name: model for model in (HUNYUAN, WAN, COSMOS25, COSMOS3, MINI)}
