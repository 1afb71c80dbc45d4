"""One study as files: `report.html`, which loads nothing else, `report.md`, `report.json`, and the
figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ... import __version__
from ...errors import InputError
from ...util import json_text
from .figures import Drawing
from .tables import Table

TEMPLATES = "residua.tools.reports", "templates"


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
class Report:
    """The results of a command of the lab. `facts` are footnotes, `data` only goes into the JSON."""

    title: str
    lead: str
    command: str
    tables: Sequence[Table]
    pictures: Sequence[Picture] = ()
    findings: Sequence[Finding] = ()
    warnings: Sequence[str] = ()  # what a reader must know before reading the numbers
    facts: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    def files(self) -> dict[str, bytes]:
        """Every file of the report, by name."""
        made = {f"{picture.name}.png": picture.drawing.png for picture in self.pictures}
        made["report.json"] = self.json().encode()
        made["report.md"] = self.markdown().encode()
        made["report.html"] = self.page().encode()
        return made

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
        if self.findings:
            lines = [f"- {item.claim}: **{item.verdict}** ({item.evidence})" for item in self.findings]
            parts.append("\n".join(lines))
        parts += [table.markdown() for table in self.tables]
        parts += [f"![{item.title}]({item.name}.png)\n\n{item.caption}" for item in self.pictures]
        parts.append("\n".join(f"- {name}: {value}" for name, value in self.facts.items()))
        return "\n\n".join(part for part in parts if part) + "\n"

    def page(self) -> str:
        """The page. Everything inserted is escaped; it runs no script and loads nothing."""
        return render_page("lab.html", report=self, style=style("lab.css"))


def render_page(name: str, package: str = TEMPLATES[0], **values: Any) -> str:
    """A template, which may extend those of the lab, with all values escaped.

    Args:
        name: Name of the template.
        package: The package whose folder `templates` holds it.
        **values: Values that the template uses.
    """
    try:
        from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise InputError("a report needs jinja2; pip install residua[lab]") from error
    packages = dict.fromkeys((package, TEMPLATES[0]))
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(one, TEMPLATES[1]) for one in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values, version=__version__)


def style(*names: str, package: str = TEMPLATES[0]) -> str:
    """The style of a page: what all pages share, then its own files."""
    shared = (files(TEMPLATES[0]) / TEMPLATES[1] / "base.css").read_text(encoding="utf-8")
    own = [(files(package) / TEMPLATES[1] / name).read_text(encoding="utf-8") for name in names]
    return "\n".join(text.strip() for text in (shared, *own))
