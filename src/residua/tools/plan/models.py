"""The models as data: sizes of a forward pass, how a video becomes tokens, what the paper reports.

Sources: the layer structure is that of diffusers' transformers; sizes are those of the released configs and
of the model in the box. Parameters of transformers, VAEs and T5 or Llama encoders were counted on the classes
of diffusers and transformers; those of other text encoders are what their makers state.
"""

from __future__ import annotations

from dataclasses import replace

from .architecture import Architecture, Reference

HUNYUAN = Architecture(
    name="hunyuanvideo",
    parameters=12.82,
    text_encoder=7.51,  # Llama 3 8B without its head
    others=0.37,
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
    parameters=14.29,
    text_encoder=5.68,  # UMT5-XXL
    others=0.13,
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
    parameters=14.37,
    text_encoder=8.29,  # Cosmos-Reason1, a Qwen2.5-VL of 7B
    others=0.13,
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
    parameters=15.16,  # both towers
    others=0.70,
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
    parameters=0.01,
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
    frames=121, parameters=5.0, others=0.70, reference=None,
)  # fmt: skip
WAN21 = replace(WAN_T2V, name="wan2.1-t2v-14b", transformers=1, steps=50)
WAN21_I2V = replace(WAN, name="wan2.1-i2v-14b", transformers=1, steps=50, parameters=16.39, others=0.76, reference=None)
WAN21_SMALL = replace(
    WAN21,
    name="wan2.1-t2v-1.3b",
    layers=30,
    heads=12,
    kv_heads=12,
    width=1536,
    mlp=8960,
    text_width=1536,
    size=(832, 480),
    parameters=1.42,
)
CONTROL = "every control block is counted as one more layer"
VACE = replace(WAN21, name="wan2.1-vace-14b", layers=40 + 8, parameters=17.34, notes=(CONTROL,))
VACE_SMALL = replace(WAN21_SMALL, name="wan2.1-vace-1.3b", layers=30 + 15, parameters=2.15, notes=(CONTROL,))
ANIMATE = replace(
    WAN21_I2V,
    name="wan2.2-animate-14b",
    steps=20,
    frames=77,
    passes=1,
    parameters=17.27,
    notes=("one segment of 77 frames; the face adapter is not counted",),
)
SKYREELS = replace(WAN21, name="skyreels-v2-14b", frames=121)
CHRONOEDIT = replace(
    WAN21_I2V, name="chronoedit-14b", frames=29, notes=("29 frames are assumed, as with its temporal reasoning",)
)
FRAMEPACK = replace(
    HUNYUAN,
    name="framepack",
    size=(832, 480),
    frames=33,
    steps=30,
    parameters=12.87,
    others=0.80,
    reference=None,
    notes=("one section of 33 frames; the tokens of its history are not counted",),
)
HUNYUAN15 = replace(
    HUNYUAN, name="hunyuanvideo-1.5", layers=54, heads=16, kv_heads=16, width=2048, mlp=4 * 2048,
    text_tokens=1000, text_width=2048, in_channels=65, out_channels=32, patch=(1, 1, 1), pixel_compression=16,
    passes=2, frames=121, parameters=8.33, text_encoder=7.62, others=1.5, reference=None,
    notes=("about 1,000 text and image tokens are assumed",),
)  # fmt: skip
COSMOS25_SMALL = replace(
    COSMOS25,
    name="cosmos-predict2.5-2b",
    layers=28,
    heads=16,
    kv_heads=16,
    width=2048,
    mlp=4 * 2048,
    parameters=2.06,
    reference=None,
)
COSMOS2 = replace(COSMOS25, name="cosmos-predict2-14b", text_encoder=4.76, reference=None)
COSMOS2_SMALL = replace(COSMOS25_SMALL, name="cosmos-predict2-2b", text_encoder=4.76)
COSMOS1 = replace(
    COSMOS2,
    name="cosmos1-7b",
    layers=28,
    heads=32,
    kv_heads=32,
    width=4096,
    mlp=4 * 4096,
    in_channels=17,
    frame_compression=8,
    frames=121,
    parameters=7.24,
)
COGVIDEOX = replace(
    HUNYUAN, name="cogvideox-5b", layers=42, heads=48, kv_heads=48, head_dim=64, width=3072, mlp=4 * 3072,
    text_tokens=226, passes=2, in_batch=2, size=(720, 480), frames=49, dense_steps=0.20, dense_layers=0.03,
    parameters=5.57, text_encoder=4.76, others=0.22, reference=None,
)  # fmt: skip
COGVIDEOX_SMALL = replace(
    COGVIDEOX, name="cogvideox-2b", layers=30, heads=30, kv_heads=30, width=1920, mlp=4 * 1920, parameters=1.69
)
COGVIDEOX15 = replace(COGVIDEOX, name="cogvideox1.5-5b", patch=(2, 2, 2), size=(1360, 768), frames=81)
CONSISID = replace(
    COGVIDEOX,
    name="consisid",
    parameters=6.16,
    others=1.5,
    notes=("its face modules are cross-attention and not counted",),
)
MOCHI = replace(
    HUNYUAN, name="mochi-1", layers=48, heads=24, kv_heads=24, width=3072, mlp=8192, mlp_matrices=3,
    in_channels=12, out_channels=12, frame_compression=6, passes=2, in_batch=2, steps=64, size=(848, 480),
    frames=163, dense_steps=0.20, dense_layers=0.03, parameters=10.03, text_encoder=4.76, others=0.46,
    reference=None,
)  # fmt: skip
LTX = replace(
    WAN21, name="ltx-video", layers=28, heads=32, kv_heads=32, head_dim=64, width=2048, mlp=8192,
    text_tokens=128, text_width=2048, in_channels=128, out_channels=128, patch=(1, 1, 1), frame_compression=8,
    pixel_compression=32, in_batch=2, size=(1216, 704), frames=121, parameters=1.92, text_encoder=4.76,
    others=0.42,
)  # fmt: skip
LTX_LARGE = replace(
    LTX,
    name="ltx-video-13b",
    layers=48,
    head_dim=128,
    width=4096,
    mlp=16384,
    text_width=4096,
    parameters=13.04,
    others=1.2,
)
LTX2 = replace(
    LTX_LARGE,
    name="ltx-2",
    text_tokens=1024,
    steps=40,
    size=(1280, 704),
    parameters=18.88,
    text_encoder=12.2,
    others=1.3,
    notes=("the audio stream is not counted, but for its weights",),
)
MINIMAX = replace(
    WAN21, name="minimax-h3", layers=50, heads=56, kv_heads=56, width=5376, mlp=14336, mlp_matrices=3,
    text="joint", text_width=5376, in_channels=24, out_channels=24, frame_compression=4,
    pixel_compression=16, parameters=33.12, text_encoder=0.0, others=0.0, frames=121,
    notes=(
        "512 text tokens and the VAE's compression are assumed; text encoder, VAE and audio are not counted",
    ),
)  # fmt: skip
FLUX = replace(
    HUNYUAN,
    name="flux.1-dev",
    layers=57,
    text_tokens=512,
    steps=28,
    size=(2048, 2048),
    frames=1,
    dense_steps=0.20,
    dense_layers=0.03,
    parameters=11.9,
    text_encoder=4.76,
    others=0.2,
    reference=None,
)
FLUX2 = replace(
    FLUX,
    name="flux.2-dev",
    layers=56,
    heads=48,
    kv_heads=48,
    width=6144,
    mlp=3 * 6144,
    mlp_matrices=3,
    text_width=6144,
    in_channels=32,
    out_channels=32,
    steps=50,
    parameters=32.22,
    text_encoder=24.0,
)
QWEN_IMAGE = replace(
    FLUX,
    name="qwen-image",
    layers=60,
    text_tokens=256,
    passes=2,
    steps=50,
    parameters=20.43,
    text_encoder=8.29,
    notes=("256 prompt tokens are assumed; each edited picture adds its own tokens",),
)
HELIOS = replace(
    WAN21,
    name="helios-14b",
    parameters=14.31,
    size=(640, 384),
    frames=33,
    notes=("one chunk of 33 frames; the tokens of its history are not counted",),
)
ANYFLOW = replace(
    WAN21,
    name="anyflow-14b",
    parameters=14.32,
    size=(832, 480),
    steps=4,
    passes=1,
    notes=("four steps without guidance are assumed; it takes any number",),
)
KANDINSKY5 = replace(
    WAN21,
    name="kandinsky5-lite",
    layers=32,
    heads=28,
    kv_heads=28,
    head_dim=64,
    width=1792,
    mlp=7168,
    text_width=1792,
    size=(768, 512),
    frames=121,
    parameters=2.01,
    text_encoder=8.29,
    others=0.37,
    notes=("checkpoints that compute through NABLA masks (those of 10 s) stay as they are",),
)
KANDINSKY5_PRO = replace(
    KANDINSKY5,
    name="kandinsky5-pro",
    layers=60,
    heads=32,
    kv_heads=32,
    head_dim=128,
    width=4096,
    mlp=16384,
    text_width=4096,
    parameters=19.31,
)
ALLEGRO = replace(
    WAN21, name="allegro", layers=32, heads=24, kv_heads=24, head_dim=96, width=2304, mlp=4 * 2304,
    text_width=2304, in_channels=4, out_channels=4, in_batch=2, steps=100, frames=88, parameters=2.77,
    text_encoder=4.76, others=0.17,
)  # fmt: skip
EASYANIMATE = replace(
    COGVIDEOX,
    name="easyanimate-v5.1-12b",
    layers=48,
    text_tokens=256,
    size=(1024, 1024),
    parameters=11.8,
    text_encoder=8.29,
    others=0.24,
)
Z_IMAGE = replace(
    FLUX,
    name="z-image",
    layers=32,
    heads=30,
    kv_heads=30,
    width=3840,
    mlp=10240,
    mlp_matrices=3,
    text_tokens=256,
    text_width=3840,
    passes=2,
    in_batch=2,
    steps=50,
    parameters=6.15,
    text_encoder=4.02,
    others=0.08,
    notes=("256 prompt tokens are assumed; its two refiners of the picture are counted as two more layers",),
)
SD35 = replace(
    FLUX, name="sd3.5-large", layers=38, heads=38, kv_heads=38, head_dim=64, width=2432, mlp=4 * 2432,
    text_tokens=333, text_width=2432, passes=2, in_batch=2, size=(1024, 1024), parameters=8.06, others=0.9,
)  # fmt: skip

MODELS = {
    model.name: model
    for model in (
        HUNYUAN, HUNYUAN15, FRAMEPACK, WAN, WAN_T2V, WAN_TI2V, ANIMATE, WAN21, WAN21_I2V, WAN21_SMALL, VACE,
        VACE_SMALL, SKYREELS, CHRONOEDIT, COSMOS25, COSMOS25_SMALL, COSMOS2, COSMOS2_SMALL, COSMOS1, COSMOS3,
        COGVIDEOX, COGVIDEOX_SMALL, COGVIDEOX15, CONSISID, MOCHI, LTX, LTX_LARGE, LTX2, MINIMAX, FLUX, FLUX2,
        QWEN_IMAGE, HELIOS, ANYFLOW, KANDINSKY5, KANDINSKY5_PRO, ALLEGRO, EASYANIMATE, Z_IMAGE, SD35, WORLD,
    )
}  # fmt: skip
