"""Tiny random transformers of every supported family, with inputs for one forward pass; offline,
milliseconds each.

Every model sees a grid of 3 x 8 x 8 video tokens (192).
"""

import inspect
from collections.abc import Callable

import diffusers
import pytest
import torch

from .common import VIDEO as VIDEO
from .common import Built
from .common import latents as latents
from .common import noise as noise
from .cosmos import cosmos3, cosmos25
from .image import flux, flux2, qwen_image, sd3, z_image
from .image import places as places
from .like_hunyuan import framepack, hunyuan, hunyuan15, motif
from .like_ltx import ltx, ltx2, ltx23, ltx25
from .like_wan import anyflow, chronoedit, helios, skyreels, wan, wan_animate, wan_vace
from .others import allegro, cogvideox, consisid, easyanimate, kandinsky5, kandinsky6, minimax_h3, mochi

QK = ("to_q.", "to_k.", "to_query.", "to_key.", "q_proj", "k_proj")  # in names of weights

BUILDERS: dict[str, Callable[[], Built]] = {
    "wan": wan,
    "wan i2v": lambda: wan(image=True),
    "wan ti2v": lambda: wan(tokens_timestep=True),
    "wan vace": wan_vace,
    "skyreels": skyreels,
    "hunyuan": hunyuan,
    "lucy": lambda: wan(channels=32),  # the edited video comes in as more channels
    "hunyuan skyreels": lambda: hunyuan(channels=8),  # so does the first picture
    "hunyuan i2v": lambda: hunyuan("token_replace"),
    "hunyuan 1.5": hunyuan15,
    "cosmos 2.5": cosmos25,
    "cosmos 3": cosmos3,
    "cogvideox": cogvideox,
    "ltx": ltx,
    "ltx 2": ltx2,
    "ltx 2.3": ltx23,
    "ltx 2.5": ltx25,
    "mochi": mochi,
    "chronoedit": chronoedit,
    "wan animate": wan_animate,
    "consisid": consisid,
    "motif": motif,
    "framepack": framepack,
    "flux": flux,
    "flux 2": flux2,
    "qwen image": qwen_image,
    "minimax h3": minimax_h3,
    "kandinsky 5": kandinsky5,
    "kandinsky 6": kandinsky6,
    "helios": helios,
    "anyflow": anyflow,
    "z image": z_image,
    "sd3.5": sd3,
    "allegro": allegro,
    "easyanimate": easyanimate,
}


def settled(built: Built, seed: int = 0) -> Built:
    """The model with weights from a generator of its own: modules draw from the global one."""
    model, inputs = built
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim > 1:
                # Queries and keys are drawn larger, so that attention is not uniform and sparsity shows.
                spread = 3.0 if any(part in name for part in QK) else 1.0
                weight.copy_(torch.randn(weight.shape, generator=draw) * spread / weight[0].numel() ** 0.5)
            elif "norm" not in name:
                weight.copy_(0.02 * torch.randn(weight.shape, generator=draw))
    if "return_dict" in inspect.signature(type(model).forward).parameters:  # Cosmos3 of 0.39 has none
        inputs = {**inputs, "return_dict": False}
    return model.eval(), inputs


def need(name: str) -> None:
    """Skips where the installed diffusers has no such class, or cannot import it."""
    try:
        getattr(diffusers, name)
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"diffusers {diffusers.__version__}: {error}")


# Models that came after the oldest diffusers.
LATER = {
    "ltx 2": "LTX2VideoTransformer3DModel",
    "ltx 2.3": "LTX2VideoTransformer3DModel",
    "ltx 2.5": "LTX2VideoTransformer3DModel",
    "cosmos 3": "Cosmos3OmniTransformer",
    "chronoedit": "ChronoEditTransformer3DModel",
    "wan animate": "WanAnimateTransformer3DModel",
    "motif": "MotifVideoTransformer3DModel",
    "flux 2": "Flux2Transformer2DModel",
    "minimax h3": "MiniMaxH3Transformer3DModel",
    "kandinsky 5": "Kandinsky5Transformer3DModel",
    "kandinsky 6": "Kandinsky6Transformer3DModel",
    "helios": "HeliosTransformer3DModel",
    "anyflow": "AnyFlowTransformer3DModel",
    "z image": "ZImageTransformer2DModel",
}


# Models whose class is older than an option that they need.
OPTIONS = {
    "cosmos 2.5": [("CosmosTransformer3DModel", "use_crossattn_projection")],
    "ltx 2.3": [("LTX2VideoTransformer3DModel", "gated_attn")],
    "ltx 2.5": [("LTX2VideoTransformer3DModel", "use_prompt_adaln_single")],
}


def build(name: str) -> Built:
    if name in LATER:
        need(LATER[name])
    for kind, option in OPTIONS.get(name, ()):
        if option not in inspect.signature(getattr(diffusers, kind).__init__).parameters:
            pytest.skip(f"diffusers {diffusers.__version__}: {kind} has no {option}")
    with torch.random.fork_rng():
        return settled(BUILDERS[name]())
