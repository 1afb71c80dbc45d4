"""Wan2.2 TI2V-5B: text, or text and a first frame, to 24 frames per second, with sparse attention.

    pip install "residua[diffusers,gpu]" imageio imageio-ffmpeg
    python wan22_ti2v_5b.py "a sailing boat in heavy sea" [first.png]

Its VAE compresses 16 x 16 x 4, so a call has 27,280 tokens at 1280 x 704 and 121 frames: less to save than
with the A14B models. `residua plan wan2.2-ti2v-5b --gpu rtx4090` says what is left.
"""

import sys

import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanPipeline
from diffusers.utils import export_to_video, load_image

import residua

MODEL = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
WIDTH, HEIGHT = 1280, 704
PROMPT, *IMAGES = sys.argv[1:]

vae = AutoencoderKLWan.from_pretrained(MODEL, subfolder="vae", torch_dtype=torch.float32)
Pipeline = WanImageToVideoPipeline if IMAGES else WanPipeline
pipe = Pipeline.from_pretrained(MODEL, vae=vae, torch_dtype=torch.bfloat16)
pipe.enable_model_cpu_offload()

handle = residua.accelerate(pipe, quality="balanced")

first = {"image": load_image(IMAGES[0]).resize((WIDTH, HEIGHT))} if IMAGES else {}
video = pipe(
    **first,
    prompt=PROMPT,
    height=HEIGHT,
    width=WIDTH,
    num_frames=121,
    num_inference_steps=50,
    guidance_scale=5.0,
    generator=torch.Generator("cpu").manual_seed(0),
).frames[0]

export_to_video(video, "wan22-ti2v-5b.mp4", fps=24)
print(handle.report())
