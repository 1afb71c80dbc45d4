"""WorldPipeline: image-to-video with the world model, as a diffusers pipeline.

The loop is that of diffusers' WanImageToVideoPipeline (same callbacks, same cache contexts), so that everything that
hooks into Wan also works with this model; only the VAE is missing, because the model works on pixels.
"""

# No postponed annotations here: diffusers before 0.37 reads the components' types from them as classes.
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import PIL.Image
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from diffusers.video_processor import VideoProcessor
from torch import Tensor

from ..errors import InputError
from . import renderer, scenes
from .model import PATCH, PromptTable, condition_channels

# Lower noise levels are divided as if they were this: the velocity of an x0 prediction is (x - x0) / s.
MIN_LEVEL = 0.02


@dataclass
class WorldPipelineOutput(BaseOutput):
    """`frames`: array or tensor [B, T, H, W, 3] / [B, T, 3, H, W] in [0, 1], or lists of PIL images."""

    frames: Any


class WorldPipeline(DiffusionPipeline):
    """Generates clips in which the balls of the first frame move as the prompt says."""

    model_cpu_offload_seq = "prompt_table->transformer"  # type: ignore[assignment]
    _callback_tensor_inputs: ClassVar = ["latents", "prompt_embeds", "negative_prompt_embeds"]

    def __init__(
        self, transformer: WanTransformer3DModel, scheduler: FlowMatchEulerDiscreteScheduler, prompt_table: PromptTable
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, prompt_table=prompt_table)
        self.video_processor = VideoProcessor(vae_scale_factor=PATCH)
        self._guidance_scale = 1.0
        self._interrupt = False

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 1.0

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        image: PIL.Image.Image | np.ndarray | Tensor | None = None,
        height: int = 64,
        width: int = 64,
        num_frames: int = 32,
        num_inference_steps: int = 20,
        guidance_scale: float = 1.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> WorldPipelineOutput | tuple[Any]:
        """Generate one clip per prompt.

        Args:
            prompt: One or several, of the closed vocabulary (`residua.world.scenes.vocabulary`).
            image: The first frame, one or one per prompt (PIL images, an array or tensor in [0, 1], an array
                of bytes); without one it is rendered from the prompt, balls where
                `residua.world.scenes.default_layout` puts them.
            height: In pixels, a multiple of 4. The model was trained at 64.
            width: In pixels, a multiple of 4. The model was trained at 64.
            num_frames: Frames of the clip, which always lasts two seconds: 32 are 8,192 tokens, 64 16,384 and
                128 32,768.
            num_inference_steps: Steps of the sampler.
            guidance_scale: Above 1 the empty prompt runs as well (classifier-free guidance).
            generator: Random numbers of the noise; pass one for a clip that can be repeated.
            latents: The noise to start from, [B, 3, T, H, W], instead of the generator's.
            output_type: "np", "pt", "pil" or "latent".
            return_dict: Whether to return an object with `frames` or a tuple.
            callback_on_step_end: Called after every step, as in other pipelines of diffusers.
            callback_on_step_end_tensor_inputs: Names of the tensors that the callback gets.

        Returns:
            The frames.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not prompts:
            raise InputError("no prompt: wanted one or several")
        parsed = [scenes.parse_prompt(text, self.prompt_table.config["max_balls"]) for text in prompts]
        self._check_inputs(height, width, num_frames, num_inference_steps, output_type)
        self._guidance_scale = guidance_scale
        self._interrupt = False
        device, dtype = self._execution_device, self.transformer.dtype

        first_frame = self._first_frame(image, parsed, height, width).to(device)
        condition = condition_channels(first_frame, num_frames)
        prompt_embeds = self.prompt_table.encode(list(parsed)).to(dtype)
        negative_prompt_embeds = self.prompt_table.encode([None] * len(parsed)).to(dtype)
        shape = (len(parsed), 3, num_frames, height, width)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        elif latents.shape != shape:
            raise InputError(f"latents of shape {list(latents.shape)}: wanted {list(shape)}")
        levels = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)  # the scheduler shifts them
        self.scheduler.set_timesteps(sigmas=levels.tolist(), device=device)

        with self.progress_bar(total=num_inference_steps) as progress_bar:
            for step, timestep in enumerate(self.scheduler.timesteps):
                if self.interrupt:
                    continue
                level = self.scheduler.sigmas[step]
                inputs = torch.cat([latents, condition], dim=1).to(dtype)
                clean = self._predict("cond", inputs, level, prompt_embeds)
                if self.do_classifier_free_guidance:
                    unguided = self._predict("uncond", inputs, level, negative_prompt_embeds)
                    clean = unguided + guidance_scale * (clean - unguided)
                velocity = (latents - clean) / level.clamp_min(MIN_LEVEL)
                latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
                if callback_on_step_end is not None:
                    names = callback_on_step_end_tensor_inputs or ["latents"]
                    available = {
                        "latents": latents,
                        "prompt_embeds": prompt_embeds,
                        "negative_prompt_embeds": negative_prompt_embeds,
                    }
                    tensors = {name: available[name] for name in names}
                    changed = callback_on_step_end(self, step, timestep, tensors)
                    latents = changed.pop("latents", latents)
                    prompt_embeds = changed.pop("prompt_embeds", prompt_embeds)
                    negative_prompt_embeds = changed.pop("negative_prompt_embeds", negative_prompt_embeds)
                progress_bar.update()

        frames = latents
        if output_type != "latent":
            frames = self.video_processor.postprocess_video(latents, output_type=output_type)
        self.maybe_free_model_hooks()
        return WorldPipelineOutput(frames=frames) if return_dict else (frames,)

    def _predict(self, branch: str, inputs: Tensor, level: Tensor, context: Tensor) -> Tensor:
        timestep = (level * 1000).expand(len(inputs)).to(inputs.device)
        with self.transformer.cache_context(branch):
            return self.transformer(inputs, timestep, context, return_dict=False)[0].float()

    def _first_frame(self, image: Any, parsed: list[scenes.Scene], height: int, width: int) -> Tensor:
        if image is None:
            layouts = [scenes.default_layout(scene) for scene in parsed]
            frames = [
                renderer.render_video(scene, layout, 1, height, width)[:, 0]
                for scene, layout in zip(parsed, layouts, strict=True)
            ]
            return torch.stack(frames)  # [B, 3, H, W]
        if isinstance(image, np.ndarray) and image.dtype == np.uint8:
            image = image / np.float32(255)  # the processor takes arrays for values in [0, 1]
        if isinstance(image, PIL.Image.Image):
            image = [image]
        if isinstance(image, list):  # pictures with transparency, grey ones
            image = [one.convert("RGB") if isinstance(one, PIL.Image.Image) else one for one in image]
        frame = self.video_processor.preprocess(image, height=height, width=width).float()
        if len(frame) not in (1, len(parsed)) or frame.shape[1] != 3:
            raise InputError(
                f"image: {len(frame)} of {frame.shape[1]} channels for {len(parsed)} prompts; wanted one, or "
                "one per prompt, of 3 channels"
            )
        return frame.expand(len(parsed), -1, -1, -1)

    @staticmethod
    def _check_inputs(height: int, width: int, num_frames: int, steps: int, output_type: str) -> None:
        if height % PATCH or width % PATCH or min(height, width) < PATCH:
            raise InputError(f"height={height}, width={width}: wanted positive multiples of {PATCH}")
        if num_frames < 1 or steps < 1:
            raise InputError(f"num_frames={num_frames}, num_inference_steps={steps}: wanted at least 1")
        if output_type not in ("np", "pt", "pil", "latent"):
            raise InputError(f"output_type={output_type!r}: wanted 'np', 'pt', 'pil' or 'latent'")
