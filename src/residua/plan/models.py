"""The models as data: what a forward pass multiplies, how a video becomes tokens, what the paper reports.

Sources: the layer structure is that of diffusers' transformers; sizes are those of the released configs
(HunyuanVideo, Wan2.2-I2V-A14B, Cosmos-Predict2.5-14B, Cosmos3-Nano) and of `residua.world.model`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    dense_layers=1,
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

WORLD = Architecture(
    name="world",
    layers=6,
    heads=2,
    kv_heads=2,
    head_dim=128,
    width=256,
    mlp=768,
    mlp_matrices=2,
    text_tokens=4,
    text="cross",
    text_width=256,
    in_channels=30,
    out_channels=3,
    patch=(1, 4, 4),
    frame_compression=1,
    pixel_compression=1,
    passes=1,
    steps=20,
    size=(64, 64),
    frames=32,
)

WAN_T2V = replace(WAN, name="wan2.2-t2v-a14b", in_channels=16, reference=None)
WAN_TI2V = replace(
    WAN, name="wan2.2-ti2v-5b", layers=30, heads=24, kv_heads=24, width=3072, mlp=14336, text_width=3072,
    in_channels=48, out_channels=48, pixel_compression=16, transformers=1, steps=50, size=(1280, 704),
    frames=121,
    reference=None,
)  # fmt: skip
WAN21 = replace(WAN_T2V, name="wan2.1-t2v-14b", transformers=1, steps=50)
WAN21_I2V = replace(WAN, name="wan2.1-i2v-14b", transformers=1, steps=50, reference=None)
WAN21_SMALL = replace(
    WAN21, name="wan2.1-t2v-1.3b", layers=30, heads=12, kv_heads=12, width=1536, mlp=8960, text_width=1536,
    size=(832, 480),
)  # fmt: skip
HUNYUAN15 = replace(
    HUNYUAN, name="hunyuanvideo-1.5", layers=54, heads=16, kv_heads=16, width=2048, mlp=4 * 2048,
    text_tokens=1000,
    text_width=2048, in_channels=65, out_channels=32, patch=(1, 1, 1), pixel_compression=16, passes=2,
    frames=121,
    reference=None, notes=("about 1,000 text and image tokens are assumed",),
)  # fmt: skip
COSMOS25_SMALL = replace(
    COSMOS25, name="cosmos-predict2.5-2b", layers=28, heads=16, kv_heads=16, width=2048, mlp=4 * 2048,
    reference=None,
)  # fmt: skip
COGVIDEOX = replace(
    HUNYUAN, name="cogvideox-5b", layers=42, heads=48, kv_heads=48, head_dim=64, width=3072, mlp=4 * 3072,
    text_tokens=226, passes=2, size=(720, 480), frames=49, dense_steps=0.20,
    dense_layers=0.03, reference=None,
)  # fmt: skip
COGVIDEOX15 = replace(
    COGVIDEOX, name="cogvideox1.5-5b", patch=(2, 2, 2), size=(1360, 768), frames=81
)  # fmt: skip
MOCHI = replace(
    HUNYUAN, name="mochi-1", layers=48, heads=24, kv_heads=24, width=3072, mlp=8192, mlp_matrices=3,
    in_channels=12, out_channels=12, frame_compression=6, passes=2, steps=64, size=(848, 480), frames=163,
    dense_steps=0.20,
    dense_layers=0.03, reference=None,
)  # fmt: skip
LTX = replace(
    WAN21, name="ltx-video", layers=28, heads=32, kv_heads=32, head_dim=64, width=2048, mlp=8192,
    text_tokens=128,
    text_width=2048, in_channels=128, out_channels=128, patch=(1, 1, 1), frame_compression=8,
    pixel_compression=32, size=(1216, 704), frames=121,
)  # fmt: skip

MODELS = {
    model.name: model
    for model in (
        HUNYUAN, HUNYUAN15, WAN, WAN_T2V, WAN_TI2V, WAN21, WAN21_I2V, WAN21_SMALL, COSMOS25, COSMOS25_SMALL,
        COSMOS3, COGVIDEOX, COGVIDEOX15, MOCHI, LTX, WORLD,
    )
}  # fmt: skip

# other names that people use, and ids on the hub, in lower case
ALIASES = {
    "wan2.2": "wan2.2-i2v-a14b",
    "wan": "wan2.2-i2v-a14b",
    "wan-ai/wan2.2-i2v-a14b-diffusers": "wan2.2-i2v-a14b",
    "wan-ai/wan2.2-t2v-a14b-diffusers": "wan2.2-t2v-a14b",
    "wan-ai/wan2.2-ti2v-5b-diffusers": "wan2.2-ti2v-5b",
    "wan2.2-5b": "wan2.2-ti2v-5b",
    "wan2.1": "wan2.1-t2v-14b",
    "wan-ai/wan2.1-t2v-14b-diffusers": "wan2.1-t2v-14b",
    "wan-ai/wan2.1-i2v-14b-720p-diffusers": "wan2.1-i2v-14b",
    "wan-ai/wan2.1-i2v-14b-480p-diffusers": "wan2.1-i2v-14b",
    "wan-ai/wan2.1-t2v-1.3b-diffusers": "wan2.1-t2v-1.3b",
    "hunyuan": "hunyuanvideo",
    "hunyuanvideo-community/hunyuanvideo": "hunyuanvideo",
    "tencent/hunyuanvideo": "hunyuanvideo",
    "hunyuanvideo1.5": "hunyuanvideo-1.5",
    "hunyuanvideo-community/hunyuanvideo-1.5-diffusers-720p_t2v": "hunyuanvideo-1.5",
    "cosmos": "cosmos-predict2.5-14b",
    "cosmos-predict2.5": "cosmos-predict2.5-14b",
    "nvidia/cosmos-predict2.5-14b": "cosmos-predict2.5-14b",
    "nvidia/cosmos-predict2.5-2b": "cosmos-predict2.5-2b",
    "cosmos3": "cosmos3-nano-16b",
    "cosmos3-nano": "cosmos3-nano-16b",
    "nvidia/cosmos3-nano": "cosmos3-nano-16b",
    "cogvideox": "cogvideox-5b",
    "thudm/cogvideox-5b": "cogvideox-5b",
    "zai-org/cogvideox-5b": "cogvideox-5b",
    "cogvideox1.5": "cogvideox1.5-5b",
    "thudm/cogvideox1.5-5b": "cogvideox1.5-5b",
    "zai-org/cogvideox1.5-5b": "cogvideox1.5-5b",
    "mochi": "mochi-1",
    "genmo/mochi-1-preview": "mochi-1",
    "ltx": "ltx-video",
    "lightricks/ltx-video": "ltx-video",
}
