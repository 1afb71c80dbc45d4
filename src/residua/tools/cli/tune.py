"""`residua tune`: finds the cheapest setting that keeps a target, and writes it as a profile for
`accelerate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InputError
from ...world.held_out import TUNING_PROMPTS
from ..reports.table import Table, number
from .app import command, console, show, writable
from .options import ForceFile, Model, PipelineOptions, Prompts, command_line, words

if TYPE_CHECKING:
    from ..generate.run import Request
    from ..generate.tune import Log, Target, Trial

MAX_PROMPT_BYTES = 1 << 20
PROMPTS = TUNING_PROMPTS[:2], TUNING_PROMPTS[2:4]  # for the search and for the check, unless others are given


@command(
    epilog="Example:  residua tune --model Wan-AI/Wan2.2-TI2V-5B-Diffusers --prompts prompts.txt "
    "--target-psnr 28 --steps 20 --out wan22.toml.  Then:  residua.accelerate(pipe, profile='wan22.toml')"
)
def tune(
    context: typer.Context,
    *,
    model: Model = "world",
    target_psnr: Annotated[float | None, typer.Option(help="At least this PSNR in dB on every video.")] = None,
    target_lpips: Annotated[float | None, typer.Option(help="At most this LPIPS on every video.")] = None,
    target_error: Annotated[
        float | None, typer.Option(help="At most this estimated error of attention, such as 0.05.")
    ] = None,
    prompt: Prompts = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt per line.")] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Prompts for the check; default: the same with another seed.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds for every prompt, comma separated.")] = "0",
    pipeline: PipelineOptions,
    tries: Annotated[int, typer.Option(min=1, help="Number of settings to try at most.")] = 7,
    out: Annotated[Path, typer.Option(help="The profile, a .toml file.")] = Path("profile.toml"),
    force: ForceFile = False,
) -> None:
    """Find the cheapest setting that keeps a target on your prompts, and write it as a profile.

    Take the steps of your runs; fewer are faster.
    """
    # Imported here, so that other commands do not wait for it.
    from ..generate import loading, require_packages
    from ..generate.tune import Log, make_profile
    from ..generate.tune import tune as search
    from ..metrics.video_quality import find_lpips
    from ..output import publish_files
    from .progress import step_bars

    require_packages()
    target = _target(psnr=target_psnr, lpips=target_lpips, error=target_error)
    if out.suffix.lower() != ".toml":
        raise InputError(f"--out {out}: wanted a name that ends in .toml")
    writable(out, force)
    facts, tuning, verifying = _requests(
        pipeline,
        [*(prompt or []), *_read_prompts("prompts", prompts)],
        _read_prompts("held-out", held_out),
        [_seed(word) for word in words("seeds", seeds)],
    )
    lpips = find_lpips(pipeline.lpips)
    if target.metric == "lpips" and isinstance(lpips, str):
        raise InputError(f"--target-lpips: {lpips}")
    pipe = loading.load(model, pipeline.placement())

    def hear(where: str, trial: Trial) -> None:
        verdict = "keeps" if trial.kept else "misses"
        console.print(
            f"{where}: density {trial.config.density:g} {verdict} {target}: {target.text(trial.worst)}, "
            f"cost {trial.cost:.1%}"
        )

    log = Log(hear)
    try:
        with step_bars() as watch:
            tuned = search(
                pipe,
                model,
                tuning,
                verifying,
                target,
                pipeline.settings(),
                lpips=lpips,
                watch=watch,
                log=log,
                tries=tries,
                noise_floor=not pipeline.no_floor,
            )
    finally:
        _print_table(model, target, log)
    profile = make_profile(pipe, model, tuned, {**facts, "command": command_line(context)})
    publish_files({out: profile.to_toml().encode()})
    config = tuned.chosen.config
    console.print(
        f"{target}: density {config.density:g}, guard {config.max_error:g}; "
        f"{target.text(tuned.chosen.worst)} on the tuning clips, {target.text(tuned.verified.worst)} on the "
        "held-out ones"
    )
    console.print(f"wrote {out}: residua.accelerate(pipe, profile={str(out)!r})", soft_wrap=True)


def _requests(
    pipeline: PipelineOptions, prompts: list[str], others: list[str], seeds: list[int]
) -> tuple[dict[str, Any], list[Request], list[Request]]:
    """What the profile says about the clips, the clips for the search, and those for the check."""
    from ..generate.run import Request

    shape = pipeline.shape()
    others = others or prompts or list(PROMPTS[1])
    prompts = prompts or list(PROMPTS[0])
    other_seeds = [max(seeds) + 1 + place for place in range(len(seeds))]
    facts = {
        "prompts": prompts,
        "seeds": seeds,
        "held_out_prompts": others,
        "held_out_seeds": other_seeds,
        **shape,
        "dtype": pipeline.dtype,
    }
    return (
        facts,
        [Request(text, seed, **shape) for text in prompts for seed in seeds],
        [Request(text, seed, **shape) for text in others for seed in other_seeds],
    )


def _target(**asked: float | None) -> Target:
    from ..generate.tune import Target

    found = [Target(name, value) for name, value in asked.items() if value is not None]
    if len(found) != 1:
        raise InputError(
            "wanted one target: --target-psnr 30 (dB against dense), --target-lpips 0.05, or --target-error "
            f"0.05 (of attention); given: {len(found)}"
        )
    return found[0]


def _read_prompts(option: str, path: Path | None) -> list[str]:
    """The lines of a file that are not empty."""
    if path is None:
        return []
    wanted = "wanted a text file with one prompt per line"
    try:
        if path.stat().st_size > MAX_PROMPT_BYTES:
            raise InputError(f"--{option} {path}: larger than {MAX_PROMPT_BYTES} bytes; {wanted}")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"--{option} {path}: cannot be read ({error.strerror}); {wanted}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--{option} {path}: not UTF-8 ({error}); {wanted}") from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise InputError(f"--{option} {path}: empty; {wanted}")
    return found


def _seed(word: str) -> int:
    if not word.isdecimal() or len(word) > 18:
        raise InputError(f"--seeds {word!r}: wanted whole numbers, comma separated")
    return int(word)


def _print_table(model: str, target: Target, log: Log) -> None:
    """Every setting that was tried, with the noise floor above the trials on the same clips."""
    from ..generate.noise_floor import MEANING

    columns = ("", "density", "guard", "cost", "worst", "PSNR dB", "LPIPS", "error", "speed -up", "")
    rows: list[tuple[str, ...]] = []
    for where, trials in log.trials.items():
        noise_floor = log.noise_floors.get(where)
        if noise_floor:
            psnr, lpips = number(noise_floor.get("psnr"), "{:.2f}"), number(noise_floor.get("lpips"), "{:.4g}")
            rows.append((f"{where}: noise floor", "", "", "", "", psnr, lpips, "", "", ""))
        rows += [(where, *_cells(trial)) for trial in trials]
    if rows:
        show(Table(f"{model}: {target}", columns, tuple(rows)).rich())
    if any(log.noise_floors.values()):
        console.print(f"the noise floor: {MEANING}", soft_wrap=True)


def _cells(trial: Trial) -> list[str]:
    config = trial.config
    return [
        f"{config.density:g}",
        f"{config.max_error:g}",
        f"{trial.cost:.1%}",
        number(trial.worst, "{:.4g}"),
        number(trial.means.psnr, "{:.2f}"),
        number(trial.means.lpips, "{:.4g}"),
        number(trial.means.error, "{:.4g}"),
        number(trial.means.speedup, "{:.2f}x"),
        "kept" if trial.kept else "missed",
    ]
