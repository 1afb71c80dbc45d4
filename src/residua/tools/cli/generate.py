"""`residua generate`: a video from any pipeline that Residua can accelerate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InputError
from .app import command, console, show, writable
from .options import ForceFile, MethodOptions, PipelineOptions, command_line

if TYPE_CHECKING:
    from ..generate.comparison import Comparison

MODEL_HELP = "Hub id, folder in the layout of diffusers, or world."


@command(
    epilog="Example:  residua generate --model Wan-AI/Wan2.2-I2V-A14B-Diffusers --image first.png "
    "--prompt 'a cat walks' --quality balanced --out cat.mp4 --compare.  Several GPUs:  "
    "torchrun --nproc-per-node 4 -m residua generate ..."
)
def generate(
    context: typer.Context,
    *,
    prompt: Annotated[str, typer.Option(help="What to show.")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    out: Annotated[Path, typer.Option(help="The video, an .mp4 file.")] = Path("video.mp4"),
    method: MethodOptions,
    image: Annotated[Path | None, typer.Option(help="First frame, for image-to-video.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What not to show.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    fps: Annotated[int, typer.Option(min=1, help="Frames per second of the file.")] = 16,
    config: Annotated[Path | None, typer.Option(help="TOML with settings of the method.")] = None,
    pipeline: PipelineOptions,
    compare: Annotated[
        bool, typer.Option("--compare", help="Generate the dense video too, and write a report.")
    ] = False,
    time_stages: Annotated[
        bool, typer.Option("--time-stages", help="Report the time of every stage; slower on a GPU.")
    ] = False,
    vbench: Annotated[bool, typer.Option("--vbench", help="Also run VBench, if it is installed.")] = False,
    force: ForceFile = False,
) -> None:
    """Generate a video with sparse attention; --compare generates the dense one too and compares them."""
    # Imported here, so that other commands do not wait for it.
    from ...config import Config
    from ..generate import compare as comparing
    from ..generate import loading, require_packages
    from ..generate.run import Request
    from ..metrics.video_quality import find_lpips
    from .progress import step_bars

    require_packages()
    targets = _targets(out, compare, force)
    placement = pipeline.placement()
    first = None if image is None else _image(image)
    request = Request(prompt, seed, **pipeline.shape(), guidance=guidance, negative_prompt=negative_prompt, image=first)
    asked = method.given(config=config)
    settings = pipeline.settings(config=None if config is None else Config.from_toml(config), **asked)
    lpips = find_lpips(pipeline.lpips)
    device = placement.torch_device
    with loading.processes(device) as (rank, world):
        pipe = loading.load(model, placement)
        loading.split_heads(pipe, world)
        with step_bars(quiet=rank > 0) as watch:
            found = comparing.compare(
                pipe,
                model,
                request,
                settings,
                lpips=lpips,
                watch=watch,
                dense=compare,
                time_stages=time_stages or device.type == "cpu",
                noise_floor=not pipeline.no_floor,
            )
    if rank == 0:
        if vbench:
            found = _with_vbench(found, fps, device.type)
        _write(found, targets, fps, command_line(context), world)


def _targets(out: Path, compare: bool, force: bool) -> dict[str, Path]:
    """The files to write; refused before any work if one exists."""
    if out.suffix.lower() != ".mp4":
        raise InputError(f"--out {out}: wanted a name that ends in .mp4")
    targets = {"sparse": out}
    if compare:
        targets["dense"] = out.with_name(f"{out.stem}.dense.mp4")
        targets["page"] = out.with_name(f"{out.stem}.report.html")
        targets["json"] = out.with_name(f"{out.stem}.report.json")
    return {name: writable(path, force) for name, path in targets.items()}


def _image(path: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"--image {path}: cannot be read ({error}); wanted a picture") from error


def _with_vbench(found: Comparison, fps: int, device: str) -> Comparison:
    from ..generate.videos import encode_mp4, to_pixels
    from ..metrics.vbench import vbench_clip

    clips = {"sparse": found.sparse.clip}
    if found.dense is not None:
        clips["dense"] = found.dense.timed.clip
    scores: dict[str, Any] = {}
    for name, clip in clips.items():
        one = vbench_clip(encode_mp4(to_pixels(clip.frames), fps), device)
        if isinstance(one, str):
            console.print(f"VBench was not measured: {one}", markup=False)
            return replace(found, vbench=one)
        console.print(f"VBench, {name}: {', '.join(f'{what} {x:.4f}' for what, x in one.items())}")
        scores[name] = one
    return replace(found, vbench=scores)


def _write(found: Comparison, targets: dict[str, Path], fps: int, command: str, world: int) -> None:
    from ..generate.page import comparison_page, report_json
    from ..generate.videos import encode_mp4, to_pixels
    from ..output import publish_files
    from .summary import summary

    made = {targets["sparse"]: encode_mp4(to_pixels(found.sparse.clip.frames), fps)}
    if found.dense is not None:
        made[targets["dense"]] = encode_mp4(to_pixels(found.dense.timed.clip.frames), fps)
        made[targets["page"]] = comparison_page(found, fps, command)
        made[targets["json"]] = report_json(found)
    publish_files(made)
    show(summary(found))
    if found.dense is None:
        console.print(found.report)  # the page shows the same
    if world > 1:
        console.print(f"pairs, FLOPs and stages are those of the first of {world} processes")
    console.print(f"wrote {', '.join(map(str, made))}", soft_wrap=True)
