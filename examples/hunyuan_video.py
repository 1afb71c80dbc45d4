"""HunyuanVideo: text to video at 1280 x 720 and 129 frames, with sparse attention.

    pip install "residua[diffusers,gpu]" imageio imageio-ffmpeg
    python hunyuan_video.py

Text and video share one attention here. Residua keeps the text tokens exact and leaves padding out.
"""

import torch
from diffusers import HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
from diffusers.utils import export_to_video

import residua

MODEL = "hunyuanvideo-community/HunyuanVideo"

transformer = HunyuanVideoTransformer3DModel.from_pretrained(MODEL, subfolder="transformer", torch_dtype=torch.bfloat16)
pipe = HunyuanVideoPipeline.from_pretrained(MODEL, transformer=transformer, torch_dtype=torch.float16)
pipe.vae.enable_tiling()  # decodes in tiles: at this size the VAE would need more memory than the transformer
pipe.enable_model_cpu_offload()

handle = residua.accelerate(pipe, quality="balanced")

video = pipe(
    prompt="A cat walks on the grass, realistic",
    height=720,
    width=1280,
    num_frames=129,
    num_inference_steps=50,
    generator=torch.Generator("cpu").manual_seed(0),
).frames[0]

export_to_video(video, "hunyuan-video.mp4", fps=24)
print(handle.report())
