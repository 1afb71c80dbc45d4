"""Options that several commands share, values of more than one number, and the command line of a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ...errors import InputError

if TYPE_CHECKING:
    from ...hosts import Settings

# Written out here: the modules that define them take seconds to import, and `--help` must be fast.
RECONSTRUCTIONS = ("anchored", "tail", "probe", "none")
CONCENTRATIONS = ("broad", "medium", "sparse")
Number = TypeVar("Number", int, float)

# Options of commands that generate videos.
Model = Annotated[str, typer.Option(help="world, a hub id, or a folder.")]
Prompts = Annotated[list[str] | None, typer.Option(help="May be given several times.")]
Size = Annotated[str | None, typer.Option(help="Pixels: one side, or width x height.")]
Frames = Annotated[int | None, typer.Option(min=1, help="Frames of the video.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Denoising steps.")]
DenseSteps = Annotated[str | None, typer.Option(help="First steps that stay dense: 2, or a share.")]
DenseLayers = Annotated[str | None, typer.Option(help="First layers that stay dense: 1, or a share.")]
MinTokens = Annotated[int | None, typer.Option(min=0, help="Calls with fewer tokens stay dense.")]
Dtype = Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Offload = Annotated[str, typer.Option(help="none, model, sequential or group.")]
LpipsWeights = Annotated[Path | None, typer.Option(help="LPIPS weights (safetensors), to measure LPIPS too.")]
NoFloor = Annotated[
    bool, typer.Option("--no-floor", help="Skip the second dense run (how far two dense runs are apart).")
]
BackendName = Annotated[str, typer.Option(help="Backend name, or auto.")]
ForceFolder = Annotated[bool, typer.Option("--force", help="Replace results in a folder that exists.")]
ForceFile = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]


def clip_shape(given: SimpleNamespace) -> tuple[int | None, int | None, int | None, int | None]:
    """Steps, height, width and frames of `--steps`, `--size` and `--frames`, in the order of a Request."""
    from ..generate.run import parse_size

    height, width = (None, None) if given.size is None else parse_size(given.size)
    return given.steps, height, width, given.frames


def dense_parts(given: SimpleNamespace) -> Settings:
    """What stays dense: `--dense-steps`, `--dense-layers` and `--min-tokens`."""
    from ...hosts import Settings

    return Settings(
        dense_steps=count_or_share("dense-steps", given.dense_steps),
        dense_layers=count_or_share("dense-layers", given.dense_layers),
        min_tokens=given.min_tokens,
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


def alone(quality: str | None, **others: object) -> None:
    """Refuses options that would contradict --quality, which sets the error bound and the density."""
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value is not None]
    if quality is not None and given:
        raise InputError(
            f"--quality {quality} together with {', '.join(given)}: a quality sets the method, its error "
            "bound and its density; leave one of them out, or give --max-error and --density"
        )


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
