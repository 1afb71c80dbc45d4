"""The two nodes: one makes a model sparse, the other shows the report."""

from typing import Any

from residua.hosts import QUALITIES, Preset, Settings

from .patch import patch_of, patched
from .picture import report_picture

CATEGORY = "model_patches/residua"
BY_DENSITY = "by density"
PRESET = Preset(
    density=0.22, dense_steps=0, dense_layers=0, source="the paper's density; steps and blocks from the node"
)


def _choice(names: list[str], default: str, tooltip: str) -> tuple[list[str], dict[str, Any]]:
    return names, {"default": default, "tooltip": tooltip}


def _number(default: float, minimum: float, maximum: float, step: float, tooltip: str) -> tuple[str, dict[str, Any]]:
    kind = "INT" if isinstance(default, int) else "FLOAT"
    return kind, {"default": default, "min": minimum, "max": maximum, "step": step, "tooltip": tooltip}


class ResiduaSparseAttention:
    """Makes the self-attention of a video model sparse."""

    CATEGORY = CATEGORY
    FUNCTION = "apply"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = (
        "Skips most query-key pairs of self-attention in long videos and stands in for what is skipped. Put "
        "it last, right before the sampler."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "A video model: Wan, HunyuanVideo, Cosmos or LTX."}),
                "quality": _choice(
                    [*QUALITIES, BY_DENSITY],
                    "balanced",
                    "How close to dense attention: a budget that goes where it reduces the error most, and "
                    f"a bound on each head. '{BY_DENSITY}' spends the same share everywhere instead.",
                ),
                "density": _number(
                    0.22, 0.01, 1.0, 0.01, f"Share of dense attention to spend. Only used with quality '{BY_DENSITY}'."
                ),
                "start_percent": _number(
                    0.0,
                    0.0,
                    1.0,
                    0.01,
                    "Sampling before this point stays dense. 0: nothing is dense by rule, the error estimate "
                    "decides. The paper keeps the first fifth dense.",
                ),
                "end_percent": _number(1.0, 0.0, 1.0, 0.01, "Sampling after this point stays dense."),
                "dense_blocks": _number(0, 0, 1000, 1, "The first blocks of the model stay dense."),
                "min_tokens": _number(
                    4096,
                    0,
                    10_000_000,
                    256,
                    "Videos with fewer tokens stay dense: below, grouping costs more than it saves.",
                ),
                "on_error": _choice(
                    ["stop", "dense"],
                    "stop",
                    "If a sparse call fails in the middle of a run: stop with the error, or go on dense with "
                    "a warning in the console and in the report.",
                ),
            }
        }

    def apply(
        self,
        model: Any,
        quality: str,
        density: float,
        start_percent: float,
        end_percent: float,
        dense_blocks: int,
        min_tokens: int,
        on_error: str,
    ) -> tuple[Any]:
        by_density = quality == BY_DENSITY
        settings = Settings(
            density=density if by_density else None,
            quality=None if by_density else quality,
            dense_layers=dense_blocks,
            min_tokens=min_tokens,
        ).resolve(PRESET)
        sampling = model.get_model_object("model_sampling")
        sigmas = sampling.percent_to_sigma(start_percent), sampling.percent_to_sigma(end_percent)
        return (patched(model, settings, (float(sigmas[0]), float(sigmas[1])), on_error),)


class ResiduaReport:
    """Shows what the last sampling run with a sparse model did."""

    CATEGORY = CATEGORY
    FUNCTION = "show"
    RETURN_TYPES = ("STRING", "IMAGE")
    RETURN_NAMES = ("text", "picture")
    OUTPUT_NODE = True
    DESCRIPTION = "What was skipped, how large the error is, how long it took; also printed to the console."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model that comes out of 'Residua sparse attention'."}),
                "latent": ("LATENT", {"tooltip": "What the sampler made: the report waits for it."}),
                "rows": (["layer", "step", "branch"], {"default": "layer", "tooltip": "The rows of the table."}),
            }
        }

    def show(self, model: Any, latent: Any, rows: str) -> dict[str, Any]:
        patch = patch_of(model)
        if patch is None:
            text = "No 'Residua sparse attention' node stands before this model: nothing to report."
            picture = report_picture(None, text)
        else:
            report = patch.report().view(rows)  # type: ignore[arg-type]
            text, picture = str(report), report_picture(report, "")
        print(text, flush=True)
        return {"ui": {"text": [text]}, "result": (text, picture)}


NODE_CLASS_MAPPINGS = {"ResiduaSparseAttention": ResiduaSparseAttention, "ResiduaReport": ResiduaReport}
NODE_DISPLAY_NAME_MAPPINGS = {"ResiduaSparseAttention": "Residua sparse attention", "ResiduaReport": "Residua report"}
