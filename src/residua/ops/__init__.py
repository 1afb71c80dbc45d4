"""How a call is computed: backends that register here and say why they cannot take a call. None falls back silently."""

from . import flashinfer, native, reference, triton
from .backend import BACKENDS, Backend, Demand
from .check import check_route, check_summary
from .select import backends, choose_backend, slow_note

__all__ = [
    "BACKENDS",
    "Backend",
    "Demand",
    "backends",
    "check_route",
    "check_summary",
    "choose_backend",
    "flashinfer",
    "native",
    "reference",
    "slow_note",
    "triton",
]
