"""Which backend runs a call: with reasons, never silently."""

import logging

import torch

from ..errors import BackendError
from .backend import BACKENDS, Backend, Demand
from .gpu_cache import recall

logger = logging.getLogger("residua.ops")

_said: set[str] = set()  # warnings of this process; each is logged once


def backends() -> dict[str, Backend]:
    """All registered backends, best first."""
    return dict(sorted(BACKENDS.items(), key=lambda item: -item[1].preference))


def _by_rank(known: dict[str, Backend], device: torch.device) -> list[Backend]:
    """What `auto` tries, in order: as `residua bench gpu` measured it on this GPU, otherwise by preference."""
    candidates = [backend for backend in known.values() if backend.preference >= 0]
    if device.type != "cuda":
        return candidates
    order = recall(device).get("order", []) if torch.cuda.is_available() else []
    return sorted(candidates, key=lambda b: order.index(b.name) if b.name in order else len(order))


def slow_note(chosen: str, demand: Demand) -> str | None:
    """What the user should know if a call on a CPU runs without the native kernels.

    Args:
        chosen: The name of the backend that runs it.
        demand: What the call asks of a backend.

    Returns:
        A sentence with the reasons; None if there is nothing to say.
    """
    if chosen != "torch" or demand.device.type != "cpu":
        return None
    native = backends().get("native")
    if native is None:
        return None
    return (
        "the torch backend runs, which may be slower than dense attention. The native one cannot: "
        f"{'; '.join(native.reasons(demand))} (`residua doctor` shows what can run here)"
    )


def rules_for(device: torch.device) -> str:
    """By which rules (`residua.method.rules`) calls run.

    Args:
        device: It holds the tensors.

    Returns:
        The name of the rules.
    """
    return "cpu" if device.type == "cpu" else "gpu"


def choose_backend(name: str, demand: Demand) -> Backend:
    """The backend of that name, or for "auto" the best one that takes the call. If that is a slow one, the
    logger says so, once.

    Args:
        name: "auto", or the name of a registered backend.
        demand: What the call asks of a backend.

    Returns:
        The backend; `BackendError` lists the reasons if none can run the call, or not the one that was named.
    """
    known = backends()
    if name != "auto":
        if name not in known:
            raise BackendError(f"backend={name!r} is not known; there are: auto, {', '.join(known)}")
        reasons = known[name].reasons(demand)
        if reasons:
            others = [other for other, it in known.items() if not it.reasons(demand)]
            raise BackendError(
                f"backend={name!r} cannot run this call: {'; '.join(reasons)}. "
                f"Use backend='auto' or one of: {', '.join(others) or 'none takes it'}"
            )
        return known[name]
    refusals = []
    for candidate in _by_rank(known, demand.device):
        reasons = candidate.reasons(demand)
        if demand.device.type == "cuda" and not candidate.gpu_by_itself:
            reasons = [*reasons, f"slower on a GPU than dense attention; backend={candidate.name!r} asks for it"]
        if not reasons:
            note = slow_note(candidate.name, demand)
            if note is not None and note not in _said:
                _said.add(note)
                logger.warning(note)
            return candidate
        refusals.append(f"{candidate.name}: {'; '.join(reasons)}")
    raise BackendError("no backend takes this call.\n  " + "\n  ".join(refusals))
