"""Options that several commands share, values of more than one number, and the command line of a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ...errors import InputError

if TYPE_CHECKING:
    from ...hosts import Settings
    from ..generate.loading import PipelinePlacement

Number = TypeVar("Number", int, float)

Model = Annotated[str, typer.Option(help="world, a hub id, or a folder.")]
Prompts = Annotated[list[str] | None, typer.Option(help="May be given several times.")]
LpipsWeights = Annotated[Path | None, typer.Option(help="LPIPS weights (safetensors), to measure LPIPS too.")]
NoFloor = Annotated[
    bool, typer.Option("--no-floor", help="Skip the second dense run (how far two dense runs are apart).")
]
BackendName = Annotated[str, typer.Option(help="Backend name, or auto.")]
ReconstructionName = Annotated[str, typer.Option(help="What stands for skipped pairs; a wrong name lists all.")]
ForceFolder = Annotated[bool, typer.Option("--force", help="Replace results in a folder that exists.")]
ForceFile = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]


@dataclass(frozen=True)
class MethodOptions:
    """How close the sparse calls must stay to dense ones."""

    quality: Annotated[str | None, typer.Option(help="faithful, balanced or fast.", show_default="balanced")] = None
    density: Annotated[
        float | None, typer.Option(help="Instead of a quality: share of dense attention that every head may spend.")
    ] = None
    max_error: Annotated[
        float | None, typer.Option(help="Bound on every head's error; each head spends at most --density.")
    ] = None
    reconstruction: Annotated[
        str | None, typer.Option(help="What stands for skipped pairs; a wrong name lists all.", show_default="anchored")
    ] = None

    def given(self, **others: object) -> dict[str, Any]:
        """The values as keywords of `Settings`. Refuses options, these and others, that would contradict --quality."""
        values = {"density": self.density, "max_error": self.max_error, "reconstruction": self.reconstruction}
        names = [f"--{name.replace('_', '-')}" for name, value in {**values, **others}.items() if value is not None]
        if self.quality is not None and names:
            raise InputError(
                f"--quality {self.quality} together with {', '.join(names)}: a quality sets the method, its error "
                "bound and its density; leave one of them out, or give --max-error and --density"
            )
        return {"quality": self.quality, **values}


@dataclass(frozen=True)
class PipelineOptions:
    """What the pipeline of a user generates, where it runs, and what stays dense."""

    size: Annotated[
        str | None, typer.Option(help="Pixels: width x height, or one side.", show_default="the pipeline's")
    ] = None
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of the video.")] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None
    dense_steps: Annotated[str | None, typer.Option(help="First steps that stay dense: 2, or a share.")] = None
    dense_layers: Annotated[str | None, typer.Option(help="First layers that stay dense: 1, or a share.")] = None
    min_tokens: Annotated[int | None, typer.Option(min=0, help="Calls with fewer tokens stay dense.")] = None
    dtype: Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto"
    offload: Annotated[str, typer.Option(help="none, model, sequential or group.")] = "none"
    lpips: LpipsWeights = None
    no_floor: NoFloor = False

    def shape(self) -> dict[str, Any]:
        """Steps and size of the clip, as keywords of a `Request`."""
        from ..generate.run import parse_size

        height, width = (None, None) if self.size is None else parse_size(self.size)
        return {"steps": self.steps, "height": height, "width": width, "frames": self.frames}

    def placement(self) -> PipelinePlacement:
        from ..generate.loading import PipelinePlacement

        return PipelinePlacement(self.device, self.dtype, self.offload)

    def settings(self, **method: Any) -> Settings:
        """What is asked of the pipeline: the method, as keywords, and what stays dense."""
        from ...hosts import Settings

        return Settings(
            **method,
            dense_steps=count_or_share("dense-steps", self.dense_steps),
            dense_layers=count_or_share("dense-layers", self.dense_layers),
            min_tokens=self.min_tokens,
        )


def count_or_share(name: str, text: str | None) -> float | None:
    """A count or a share: '2' means two, '0.1' a tenth of all."""
    if text is None:
        return None
    try:
        return int(text) if text.strip().isdigit() else float(text)
    except ValueError:
        raise InputError(f"--{name} {text!r}: wanted a whole number, or a share such as 0.1") from None


def numbers(name: str, text: str) -> list[float]:
    """The numbers of an option that takes several, separated by commas."""
    return _each(float, "numbers", name, text)


def whole_numbers(name: str, text: str) -> list[int]:
    """The same for whole numbers."""
    return _each(int, "whole numbers", name, text)


def _each(kind: Callable[[str], Number], wanted: str, name: str, text: str) -> list[Number]:
    parts = words(name, text)
    try:
        return [kind(part) for part in parts]
    except ValueError:
        raise InputError(f"--{name} {text!r}: wanted {wanted} separated by commas") from None


def words(name: str, text: str) -> list[str]:
    """The same for words; at least one."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError(f"--{name} {text!r}: wanted at least one value")
    return parts


def command_line(context: typer.Context, leave_out: tuple[str, ...] = ("out", "force")) -> str:
    """The command that repeats a run: options that were given or have a default, without private paths."""
    parts = ["residua", context.info_name or ""]
    for name, value in context.params.items():
        if name in leave_out or isinstance(value, Path) or value is None or value is False:
            continue
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, (list, tuple)) else [value]:
            parts += [option] if one is True else [option, str(one)]
    return shlex.join(parts)
