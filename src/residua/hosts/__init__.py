"""Residua inside a host: one contract for every program that runs video transformers.

>>> host = HostAttention(Settings(quality="balanced").resolve(preset))   # doctest: +SKIP
>>> out = host.call(q, k, v, Site(3, Pass(step=7, steps=50, branch="cond")), dense)   # doctest: +SKIP
>>> print(make_report([host]))   # doctest: +SKIP
"""

from ..method.inputs import key_padding
from .host import HostAttention
from .profile import ModelFacts, Profile
from .quality import QUALITIES, Quality, find_quality
from .report.data import Report, ReportRow, TransformerReport, make_report
from .settings import Preset, ResolvedSettings, Settings, min_tokens_for
from .site import Grid, Pass, Site, around, noise_removed

__all__ = [
    "QUALITIES", "Grid", "HostAttention", "ModelFacts", "Pass", "Preset", "Profile", "Quality", "Report", "ReportRow",
    "ResolvedSettings", "Settings", "Site", "TransformerReport", "around", "find_quality", "key_padding", "make_report",
    "min_tokens_for", "noise_removed",
]  # fmt: skip
