"""Cosmos-Predict2.5 2B: a world from text, continued from an image or a video, with sparse attention.

    pip install "residua[diffusers,gpu]" imageio imageio-ffmpeg
    python cosmos_predict25.py "a red bus starts to move as the light turns green" [first.png | start.mp4]

Without a file the world is made from the text alone.
"""

import sys

import torch
from diffusers import Cosmos2_5_PredictBasePipeline
from diffusers.utils import export_to_video, load_image, load_video

import residua

MODEL, REVISION = "nvidia/Cosmos-Predict2.5-2B", "diffusers/base/post-trained"
PROMPT, *FILES = sys.argv[1:]

pipe = Cosmos2_5_PredictBasePipeline.from_pretrained(MODEL, revision=REVISION, torch_dtype=torch.bfloat16)
pipe.enable_model_cpu_offload()

handle = residua.accelerate(pipe, quality="balanced")

is_video = bool(FILES) and FILES[0].endswith((".mp4", ".webm", ".gif"))
video = pipe(
    image=load_image(FILES[0]) if FILES and not is_video else None,
    video=load_video(FILES[0]) if is_video else None,
    prompt=PROMPT,
    height=704,
    width=1280,
    num_frames=93,
    generator=torch.Generator("cpu").manual_seed(1),
).frames[0]

export_to_video(video, "cosmos-predict25.mp4", fps=16)
print(handle.report())
