"""What to evaluate: a TOML file as validated dataclasses."""

import math
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...baselines.methods import method_names
from ...config import read_toml
from ...errors import InputError
from ...hosts import QUALITIES, Settings
from ...util.spelling import did_you_mean
from ..generate.loading import DTYPES, OFFLOADS, WORLD, looks_like_a_path
from ..generate.run import Request, parse_size
from .prompts import Prompt, read_prompts
from .tables import TomlTable

DENSE, NOISE_FLOOR = "dense", "dense again"
SCORERS = ("vbench", "pbench")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}")  # also used as a folder name
WANTED_MODEL = "wanted such a folder, a hub id such as Wan-AI/Wan2.2-TI2V-5B-Diffusers, or world"
MAX_FPS, MAX_THREADS = 1000, 1024
_NUMBERS = ("density", "max_error", "dense_steps", "dense_layers")


@dataclass(frozen=True)
class Setting:
    """One way to generate. `asked` is None for dense attention, and for the noise floor."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)  # as in the suite; part of the row's id

    @property
    def is_dense(self) -> bool:
        return self.name == DENSE

    @property
    def is_noise_floor(self) -> bool:
        return self.name == NOISE_FLOOR

    @property
    def asked(self) -> Settings | None:
        if self.is_dense or self.is_noise_floor:
            return None
        return Settings.from_dict(self.options)


@dataclass(frozen=True)
class Generation:
    """What all clips have in common; None leaves a value to the pipeline."""

    steps: int | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    guidance: float | None = None
    negative_prompt: str | None = None
    fps: int = 16

    def request(self, prompt: str, seed: int, image: Any = None) -> Request:
        return Request(
            prompt, seed, self.steps, self.height, self.width, self.frames, self.guidance, self.negative_prompt, image
        )


@dataclass(frozen=True)
class Workers:
    """How the work is done; none of it changes a measured result."""

    device: str = "auto"
    dtype: str = "auto"
    offload: str = "none"
    workers: int | None = None  # None: one per GPU, or depending on the cores
    threads: int | None = None  # of a worker on the CPU; None: depending on cores and workers
    retries: int = 1  # for a row whose worker died, or that failed for a reason that may pass
    keep_references: bool = True


@dataclass(frozen=True)
class Suite:
    """A whole suite. Dense comes first among the settings."""

    model: str
    prompts: tuple[Prompt, ...]
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]
    generation: Generation = Generation()
    work: Workers = Workers()
    lpips: str | None = None
    scorers: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    name: str = "evaluation"

    @property
    def own_settings(self) -> list[str]:
        """The settings that are Residua's own method, not the paper's or another's."""
        return [one.name for one in self.settings if one.asked is not None and one.asked.is_residua]

    def setting(self, name: str) -> Setting:
        return next(setting for setting in self.settings if setting.name == name)

    @property
    def fixed(self) -> dict[str, Any]:
        """What all rows of a folder must have in common: a change would make every row a different one."""
        same = {name: getattr(self.work, name) for name in ("dtype", "device")}
        return {"model": self.model, **asdict(self.generation), **same}

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fixed": self.fixed}


def read_suite(path: Path) -> Suite:
    """Reads a suite from a TOML file; InputError says what is wrong and what to do."""
    data = read_toml(path, 'model = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"')
    try:
        return _suite(TomlTable(data), path)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _suite(table: TomlTable, path: Path) -> Suite:
    folder = path.parent
    model = table.need("model", str, 'model = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"')
    metrics = table.table("metrics")
    suite = Suite(
        model=_model(model, folder),
        prompts=read_prompts(table.table("prompts"), folder),
        seeds=_seeds(table),
        settings=_settings(table.table("settings"), metrics.get("floor", bool, True)),
        generation=_generation(table.table("generation")),
        work=_work(table.table("run")),
        lpips=_file(metrics, "lpips", folder),
        scorers=tuple(_words(metrics, "scorers", SCORERS)),
        scores=tuple(str(_existing(folder / name, "scores")) for name in _words(metrics, "scores")),
        name=table.get("name", str, path.stem),
    )
    metrics.finish()
    table.finish()
    return suite


def _model(name: str, folder: Path) -> str:
    """A folder as an absolute path, the other names as they are."""
    if name == WORLD:
        return name
    local = folder / os.path.expanduser(name)
    if os.path.isfile(local / "model_index.json"):
        return str(local.resolve())
    if looks_like_a_path(name):
        raise InputError(f"model = {name!r}: {local} is no folder with model_index.json; {WANTED_MODEL}")
    return name


def _seeds(table: TomlTable) -> tuple[int, ...]:
    seeds = table.get("seeds", list, [0])
    whole = all(isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**63 for seed in seeds)
    if not seeds or not whole or len(set(seeds)) < len(seeds):
        raise table.error("seeds", "wanted different whole numbers from 0, such as [0, 1, 2]")
    return tuple(seeds)


def _generation(table: TomlTable) -> Generation:
    size = table.get("size", str)
    height, width = (None, None) if size is None else parse_size(size)
    found = table.fill(Generation, height=height, width=width)
    if not 1 <= found.fps <= MAX_FPS:
        raise table.error("fps", f"wanted 1 to {MAX_FPS}")
    if found.guidance is not None and not math.isfinite(found.guidance):
        raise table.error("guidance", "wanted a finite number")
    found.request("a prompt", 0)  # refuses steps and frames below 1
    return found


def _settings(table: TomlTable, noise_floor: bool) -> tuple[Setting, ...]:
    found = [Setting(DENSE), *([Setting(NOISE_FLOOR)] if noise_floor else [])]
    for name in table.names():
        if not _NAME.fullmatch(name) or name.endswith("."):
            raise InputError(f"[settings.{name}]: wanted letters, digits, blanks, . _ and - (it names a folder)")
        if name == NOISE_FLOOR:
            raise InputError(f'[settings."{NOISE_FLOOR}"] is the noise floor: [metrics] floor = true measures it')
        options = _options(table.table(name))
        if name == DENSE:
            if options:
                raise InputError(f"[settings.{DENSE}] takes no options: it is the reference, which always runs")
            continue
        found.append(_checked(Setting(name, options)))
    table.finish()
    if not any(setting.asked for setting in found):
        raise InputError('no setting other than dense: write, for example, [settings.balanced] quality = "balanced"')
    return tuple(found)


def _options(table: TomlTable) -> dict[str, Any]:
    options: dict[str, Any] = {name: table.get(name, float) for name in _NUMBERS}
    options["min_tokens"] = table.get("min_tokens", int)
    options["reconstruction"] = table.get("reconstruction", str)
    for name, known in (("method", method_names()), ("quality", list(QUALITIES))):
        options[name] = table.get(name, str)
        if options[name] is not None and options[name] not in known:
            hint = did_you_mean(options[name], known)
            raise table.error(name, f"wanted one of {', '.join(known)}{hint}")
    options["config"] = table.get("config", dict)
    table.finish()
    return {name: value for name, value in options.items() if value is not None}


def _checked(setting: Setting) -> Setting:
    """Checks the setting now, not after a model is loaded."""
    place = f"[settings.{setting.name}]"
    if not setting.options:
        raise InputError(f"{place} is empty: wanted method, quality, density or config")
    try:
        assert setting.asked is not None
    except InputError as error:
        raise InputError(f"{place} {error}") from error
    return setting


def _work(table: TomlTable) -> Workers:
    found = table.fill(Workers)
    for name, known in (("dtype", ("auto", *DTYPES)), ("offload", OFFLOADS)):
        if getattr(found, name) not in known:
            raise table.error(name, f"wanted one of {', '.join(known)}")
    for name, minimum in (("workers", 1), ("threads", 1), ("retries", 0)):
        value = getattr(found, name)
        if value is not None and value < minimum:
            raise table.error(name, f"wanted at least {minimum}")
    if found.threads is not None and found.threads > MAX_THREADS:  # torch would end the process
        raise table.error("threads", f"wanted at most {MAX_THREADS}")
    return found


def _words(table: TomlTable, name: str, known: tuple[str, ...] | None = None) -> list[str]:
    words = table.get(name, list, [])
    for word in words:
        if not isinstance(word, str) or (known is not None and word not in known):
            hint = did_you_mean(str(word), known) if known else ""
            raise table.error(name, f"wanted a list of {', '.join(known) if known else 'files'}{hint}")
    return words


def _file(table: TomlTable, name: str, folder: Path) -> str | None:
    given = table.get(name, str)
    return None if given is None else str(_existing(folder / os.path.expanduser(given), name))


def _existing(path: Path, name: str) -> Path:
    if not os.path.isfile(path):
        raise InputError(f"[metrics] {name}: {path} does not exist")
    return path.resolve()
