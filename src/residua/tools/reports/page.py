"""Results as files: `report.html`, which loads nothing else, `report.md`, `report.json`, and the figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ... import __version__
from ...errors import InputError
from ...util import json_text
from .figure import Drawing
from .table import Table


@dataclass(frozen=True)
class Picture:
    """A figure with its caption."""

    name: str  # of its file, without the ending
    title: str
    caption: str
    drawing: Drawing


@dataclass(frozen=True)
class Finding:
    """A claim and what the numbers say about it: True, False, or None if they do not decide; `mixed` if it
    holds for some models or in part. `instead` replaces the verdict."""

    claim: str
    holds: bool | None
    evidence: str
    mixed: bool = False
    instead: str = ""
    any_length: bool = False  # whether short calls count as much as long ones

    @property
    def verdict(self) -> str:
        if self.instead:
            return self.instead
        if self.mixed:
            return "mixed"
        return {True: "confirmed", False: "contradicted", None: "not measured"}[self.holds]


@dataclass(frozen=True)
class Page:
    """The results of a command. `facts` are footnotes, `data` only goes into the JSON, `more` only into the HTML."""

    title: str
    lead: str
    command: str
    tables: Sequence[Table]
    pictures: Sequence[Picture] = ()
    findings: Sequence[Finding] = ()
    warnings: Sequence[str] = ()  # what a reader must know before reading the numbers
    facts: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    template: str = "page.html"  # or one that extends it
    more: Mapping[str, Any] = field(default_factory=dict)  # what that template shows

    def files(self) -> dict[str, bytes]:
        """Every file, by name."""
        made = {f"{picture.name}.png": picture.drawing.png for picture in self.pictures}
        texts = {"report.json": self.json(), "report.md": self.markdown(), "report.html": self.html()}
        return made | {name: text.encode() for name, text in texts.items()}

    def json(self) -> str:
        found = {
            "title": self.title,
            "command": self.command,
            "version": __version__,
            "warnings": list(self.warnings),
            "facts": dict(self.facts),
            "findings": [
                {"claim": item.claim, "verdict": item.verdict, "evidence": item.evidence} for item in self.findings
            ],
            "tables": [table.to_dict() for table in self.tables],
            "data": dict(self.data),
        }
        return json_text.dumps(found, indent=1) + "\n"

    def markdown(self) -> str:
        parts = [f"# {self.title}", self.lead, f"    {self.command}"]
        parts += [f"**{warning}**" for warning in self.warnings]
        parts.append("\n".join(f"- {item.claim}: **{item.verdict}** ({item.evidence})" for item in self.findings))
        parts += [table.markdown() for table in self.tables]
        parts += [f"![{item.title}]({item.name}.png)\n\n{item.caption}" for item in self.pictures]
        parts.append("\n".join(f"- {name}: {value}" for name, value in self.facts.items()))
        return "\n\n".join(part for part in parts if part) + "\n"

    def html(self) -> str:
        return render(self.template, page=self, **self.more)


def render(template: str, **values: Any) -> str:
    """One file of `templates/`. Every value is escaped; the page loads nothing."""
    return str(_environment().get_template(template).render(**values, version=__version__))


def template_text(name: str) -> str:
    """A file of `templates/` as it is, without the space around it."""
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8").strip()


@lru_cache(maxsize=1)
def _environment() -> Any:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise InputError("a report needs jinja2; pip install residua[lab]") from error
    loader, strict = PackageLoader(__package__), StrictUndefined
    return Environment(loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
