"""Wan2.2 I2V-A14B: a first frame to video, with sparse attention.

    pip install "residua[diffusers,gpu]" imageio imageio-ffmpeg
    python wan22_i2v.py first.png "the cat turns its head and yawns"

The video has the shape of the picture, with about as many pixels as 1280 x 720.
"""

import sys

import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
from diffusers.utils import export_to_video, load_image

import residua

MODEL = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
AREA = 1280 * 720  # pixels; the aspect ratio follows the image
IMAGE, PROMPT = sys.argv[1:3]

vae = AutoencoderKLWan.from_pretrained(MODEL, subfolder="vae", torch_dtype=torch.float32)
pipe = WanImageToVideoPipeline.from_pretrained(MODEL, vae=vae, torch_dtype=torch.bfloat16)
pipe.enable_model_cpu_offload()

handle = residua.accelerate(pipe, quality="balanced")

image = load_image(IMAGE)
scale = (AREA / (image.width * image.height)) ** 0.5
width, height = (round(side * scale) // 16 * 16 for side in image.size)  # 8 from the VAE times 2 from a patch

video = pipe(
    image=image.resize((width, height)),
    prompt=PROMPT,
    height=height,
    width=width,
    num_frames=81,
    num_inference_steps=40,
    guidance_scale=3.5,
    generator=torch.Generator("cpu").manual_seed(0),
).frames[0]

export_to_video(video, "wan22-i2v.mp4", fps=16)
print(handle.report())
