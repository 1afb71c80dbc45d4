"""A profile: the settings that `residua tune` found for a model, with their evidence, as TOML.

[residua]    settings of the method, as in any TOML file of `Config.from_toml`
[run]        dense first steps and layers, minimum tokens of a sparse call
[model]      the model it was made for; another model is refused
[evidence]   target, prompts, what was tried, versions: for readers, never used
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import Config
from ..errors import InputError
from ..util.spelling import did_you_mean
from ..util.toml_text import read_toml, table_lines
from .settings import Settings

logger = logging.getLogger("residua.hosts")

FORMAT = 1
TABLES = ("residua", "run", "model", "evidence")
RUN = ("dense_steps", "dense_layers", "min_tokens")
MODEL = {"name": str, "transformers": list, "layers": int, "head_dim": int}


@dataclass(frozen=True)
class ModelFacts:
    """What identifies a model.

    Args:
        name: As the user named it; for readers.
        transformers: Class names, in the order of the pipeline.
        layers: Self-attention layers of all of them.
        head_dim: D, if the model's config says it.
    """

    name: str
    transformers: tuple[str, ...]
    layers: int
    head_dim: int | None = None

    def __str__(self) -> str:
        dim = "" if self.head_dim is None else f", head dim {self.head_dim}"
        return f"{' + '.join(self.transformers)} with {self.layers} attention layers{dim}"


@dataclass(frozen=True)
class Profile:
    """Settings for one model.

    Args:
        settings: A config, dense first steps and layers, and the minimum of tokens.
        model: The model that it was made for.
        evidence: Plain values, for readers.
    """

    settings: Settings
    model: ModelFacts
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """How a sparse call is approximated."""
        return self.settings.config or Config()

    def check_model(self, found: ModelFacts, source: str) -> None:
        """Refuses another kind of transformer; warns about the same kind in another size.

        Args:
            found: The model that is to be accelerated.
            source: Where the profile comes from, for the message.
        """
        made_for = self.model
        if found.transformers != made_for.transformers:
            raise InputError(
                f"{source} was made for {made_for}, this is {found}: run `residua tune` for this model, or "
                f"take its settings at your own risk with config=Config.from_toml({source!r})"
            )
        known = (made_for.head_dim, found.head_dim)
        other_dim = None not in known and known[0] != known[1]
        if found.layers != made_for.layers or other_dim:
            logger.warning(
                "%s was made for %s, this is %s: other sizes may need other settings; look at the report, or "
                "run `residua tune` for this model",
                source,
                made_for,
                found,
            )

    def to_toml(self) -> str:
        """The file, with only the settings of the method that differ from the default."""
        default = Config().to_dict()
        settings = {name: value for name, value in self.config.to_dict().items() if value != default[name]}
        tables = {
            "residua": {"density": self.config.density, **settings},
            "run": {name: getattr(self.settings, name) for name in RUN},
            "model": asdict(self.model),
            "evidence": self.evidence,
        }
        lines = [
            f"# Written by residua tune {__version__}: accelerate(pipe, profile=...) reads it.",
            f"format = {FORMAT}",
        ]
        for name, table in tables.items():
            lines += table_lines(name, table)
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, path: str | Path) -> Profile:
        """Reads and checks a profile.

        Args:
            path: A TOML file as `to_toml` writes it.

        Returns:
            The profile; `InputError` says what is wrong with the file and what is wanted.
        """
        path = Path(path)
        data = read_toml(path, "format = 1")
        if "format" not in data:
            raise InputError(
                f"{path}: no `format`: not a profile of `residua tune`; settings alone are read by "
                "config=Config.from_toml(...)"
            )
        if data["format"] != FORMAT or isinstance(data["format"], bool):
            raise InputError(f"{path}: format {data['format']!r}; residua {__version__} reads {FORMAT}: tune again")
        _only(path, "", data, ("format", *TABLES))
        tables = {name: _as_table(path, name, data) for name in TABLES}
        _only(path, "run.", tables["run"], RUN)
        try:
            settings = Settings.from_dict({"config": tables["residua"], **tables["run"]})
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        return cls(settings, _model(path, tables["model"]), tables["evidence"])


def _as_table(path: Path, name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    table = data.get(name, {})
    if not isinstance(table, dict):
        raise InputError(f"{path}: `{name}` is {type(table).__name__}; wanted a table [{name}]")
    return table


def _model(path: Path, table: dict[str, Any]) -> ModelFacts:
    _only(path, "model.", table, tuple(MODEL))
    for name, kind in MODEL.items():
        if name not in table:
            if name == "head_dim":
                continue
            raise InputError(f"{path}: no `{name}` in [model]: tune again, or add it by hand")
        if not isinstance(table[name], kind) or isinstance(table[name], bool):
            raise InputError(f"{path}: model.{name}={table[name]!r}: wanted {kind.__name__}")
    if not all(isinstance(one, str) for one in table["transformers"]):
        raise InputError(f"{path}: model.transformers={table['transformers']!r}: wanted class names")
    names = tuple(table["transformers"])
    return ModelFacts(table["name"], names, table["layers"], table.get("head_dim"))


def _only(path: Path, prefix: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in table:
        if name not in known:
            hint = did_you_mean(name, known)
            raise InputError(f"{path}: unknown `{prefix}{name}`; wanted {', '.join(known)}{hint}")
