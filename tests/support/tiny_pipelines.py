"""Tiny pipelines: the real classes of diffusers, random weights, prompt embeddings in and latents out."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from PIL import Image

from tests.support import tiny_models as tiny

SIZE = {"height": 128, "width": 128, "num_frames": 9}  # 3 x 8 x 8 tokens
EMBEDS = {"prompt_embeds": torch.ones(1, 12, 16), "negative_prompt_embeds": torch.zeros(1, 12, 16)}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def unipc() -> Any:
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )


def vae(channels: int = 16) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return diffusers.AutoencoderKLWan(
            base_dim=3,
            z_dim=channels,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * channels,
            latents_std=[1.0] * channels,
        )


def model(built: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        return tiny.settled(built, seed)[0]


class Tiny:
    """A pipeline and a call of it."""

    def __init__(self, pipe: Any, **arguments: Any) -> None:
        self.pipe = pipe
        self.arguments = arguments
        pipe.set_progress_bar_config(disable=True)

    def __call__(self, steps: int = 5, **changes: Any) -> torch.Tensor:
        arguments = {**self.arguments, "generator": seeded(), "output_type": "latent", **changes}
        out = self.pipe(num_inference_steps=steps, **arguments)
        return out.video if hasattr(out, "video") else out.frames


def wan() -> Tiny:
    pipe = diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=unipc(), transformer=model(tiny.wan())
    )
    return Tiny(pipe, **EMBEDS, **SIZE, guidance_scale=5.0)


def wan22_i2v() -> Tiny:
    pipe = diffusers.WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae(),
        scheduler=unipc(),
        image_encoder=None,
        image_processor=None,
        transformer=model(tiny.wan(image=True)),
        transformer_2=model(tiny.wan(image=True), seed=1),
        boundary_ratio=0.9,
    )
    return Tiny(pipe, image=Image.new("RGB", (128, 128), (120, 30, 60)), **EMBEDS, **SIZE, guidance_scale=3.5)


def hunyuan() -> Tiny:
    """With true classifier-free guidance: two calls per step."""
    pipe = diffusers.HunyuanVideoPipeline(
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        vae=None,
        transformer=model(tiny.hunyuan()),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    return Tiny(
        pipe,
        prompt_embeds=torch.ones(1, 8, 16),
        pooled_prompt_embeds=torch.ones(1, 8),
        prompt_attention_mask=mask,
        negative_prompt_embeds=torch.zeros(1, 8, 16),
        negative_pooled_prompt_embeds=torch.zeros(1, 8),
        negative_prompt_attention_mask=mask,
        true_cfg_scale=4.0,
        **SIZE,
    )


class NoChecker:
    """In the place of the cosmos_guardrail package."""

    def to(self, *_: Any) -> NoChecker:
        return self

    def check_text_safety(self, _: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def cosmos25() -> Tiny:
    pipe = diffusers.Cosmos2_5_PredictBasePipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=model(tiny.cosmos25()),
        vae=vae(),
        scheduler=unipc(),
        safety_checker=NoChecker(),
    )
    embeds = {"prompt_embeds": torch.ones(1, 12, 64), "negative_prompt_embeds": torch.zeros(1, 12, 64)}
    return Tiny(pipe, prompt=None, **embeds, **SIZE)


class TinyTokenizer:
    """As many ids as the text has words, at most 11."""

    eos_token_id = 1

    def convert_tokens_to_ids(self, _: str) -> int:
        return 2

    def apply_chat_template(self, conversations: Any, **_: Any) -> Any:
        words = " ".join(part["content"] for part in conversations).split()
        return type("Encoding", (), {"input_ids": [3 + len(word) % 50 for word in words[:11]]})()


def cosmos3() -> Tiny:
    pipe = diffusers.Cosmos3OmniPipeline(
        transformer=model(tiny.cosmos3(channels=16)),
        text_tokenizer=TinyTokenizer(),
        vae=vae(),
        scheduler=unipc(),
        enable_safety_checker=False,
    )
    return Tiny(pipe, prompt="a red ball rolls", use_system_prompt=False, **SIZE, guidance_scale=4.0)


def cogvideox() -> Tiny:
    """Its scheduler does not tell the step."""
    pipe = diffusers.CogVideoXPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        transformer=model(tiny.cogvideox()),
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )
    embeds = {"prompt_embeds": torch.ones(1, 8, 8), "negative_prompt_embeds": torch.zeros(1, 8, 8)}
    return Tiny(pipe, **embeds, **SIZE, guidance_scale=5.0)


def wan_vace() -> Tiny:
    pipe = diffusers.WanVACEPipeline(
        tokenizer=None, text_encoder=None, vae=vae(), scheduler=unipc(), transformer=model(tiny.wan_vace(96))
    )
    return Tiny(pipe, **EMBEDS, **SIZE, guidance_scale=5.0)


def skyreels_forcing() -> Tiny:
    """Diffusion forcing: it steps copies of its scheduler, and timesteps are per frame."""
    pipe = diffusers.SkyReelsV2DiffusionForcingPipeline(
        tokenizer=None, text_encoder=None, vae=vae(), scheduler=unipc(), transformer=model(tiny.skyreels())
    )
    return Tiny(pipe, prompt=None, **EMBEDS, **SIZE, guidance_scale=5.0, base_num_frames=9)


def ltx() -> Tiny:
    pipe = diffusers.LTXPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        transformer=model(tiny.ltx()),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    return Tiny(pipe, **_masked_embeds(torch.ones(1, 6)), height=256, width=256, num_frames=17)


def mochi() -> Tiny:
    pipe = diffusers.MochiPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        transformer=model(tiny.mochi()),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    )
    return Tiny(pipe, **_masked_embeds(torch.tensor([[1, 1, 1, 1, 0, 0]]).bool()), height=128, width=128, num_frames=13)


def _masked_embeds(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "prompt_embeds": torch.ones(1, 6, 16),
        "negative_prompt_embeds": torch.zeros(1, 6, 16),
        "prompt_attention_mask": mask,
        "negative_prompt_attention_mask": mask,
    }


PIPELINES = {
    "wan": wan,
    "wan vace": wan_vace,
    "skyreels forcing": skyreels_forcing,
    "ltx": ltx,
    "mochi": mochi,
    "wan22 i2v": wan22_i2v,
    "hunyuan": hunyuan,
    "cosmos 2.5": cosmos25,
    "cosmos 3": cosmos3,
    "cogvideox": cogvideox,
}
# Pipelines that came after the oldest diffusers.
LATER = {"cosmos 2.5": "Cosmos2_5_PredictBasePipeline", "cosmos 3": "Cosmos3OmniPipeline"}


def build(name: str) -> Tiny:
    if name in LATER:
        tiny.need(LATER[name])
    return PIPELINES[name]()
