"""Why an attention call of a host stays dense: by its layer, its step, its size, its mask or its backend."""

import fnmatch
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from ..errors import BackendError, InputError, IntegrationError
from ..method.inputs import DTYPES
from ..ops import Demand, choose_backend, slow_note
from .settings import ResolvedSettings, chosen_layers, min_tokens_for, part_of
from .site import Pass, Site

Answer = Literal["stop", "dense"]

FIRST_STEPS = "first steps"
FIRST_LAYERS = "first layers"
NOT_SELECTED = "layer not selected"
FEW_TOKENS = "fewer than min_tokens"
ROW_MASK = "mask is not key padding"
UNSUPPORTED = "not supported"


class Why(NamedTuple):
    """Why a call stays dense, and the number that decided."""

    reason: str
    number: str = ""


class DenseReasons:
    """Decides which calls of a transformer stay dense.

    Args:
        settings: How it is accelerated.
        layers: Names of the self-attention layers, if the host knows them before the first call.
        depths: The position of each of `layers`, counted from the input; None: as they are listed.
        unsupported: What happens to a call that no backend takes: "stop" raises, "dense" is a reason.
    """

    def __init__(
        self, settings: ResolvedSettings, layers: Sequence[str], depths: Sequence[int] | None, unsupported: Answer
    ) -> None:
        self._settings, self._unsupported = settings, unsupported
        # Number of layers from input to output; None: unknown.
        self._depth = None if not layers else len(layers) if depths is None else max(depths) + 1
        self._selected = chosen_layers(settings.layers, list(layers)) if layers else None
        self.min_tokens = settings.min_tokens  # None until a call shows the device
        # Kinds of calls that a backend takes, and what is to be said about a slow one.
        self._taken: dict[Demand, str | None] = {}

    def first(self, q: Tensor, v: Tensor, site: Site, mask: Tensor | None, valid: Tensor | None) -> Why | None:
        """The first reason against a sparse call, or None.

        Args:
            q: [B, H, Nq, D].
            v: [B, Hkv, Nk, Dv].
            site: Where the call belongs.
            mask: The host's attention mask.
            valid: The mask as key padding [B, Nk]; None if it is something else.
        """
        video = site.video_tokens(q.shape[2])
        if self.min_tokens is None:
            self.min_tokens = min_tokens_for(q.device)
        if not self._is_selected(site):
            return Why(NOT_SELECTED, f"layers={list(self._settings.layers or ())}")
        steps = self.dense_steps(site.now)
        if site.now.step < steps:
            # A backend that cannot run is refused now, not after minutes of dense steps.
            why = self._why_unsupported(q, v)
            of = f"step {site.now.step} of {site.now.steps or '?'}"
            return why or Why(FIRST_STEPS, f"{of}, the first {steps} stay dense")
        layers = self._dense_layers()
        if site.place < layers:
            return Why(FIRST_LAYERS, f"the first {layers} layers stay dense")
        if video < self.min_tokens:
            return Why(FEW_TOKENS, f"{video:,} video tokens < min_tokens {self.min_tokens:,}")
        if mask is not None and valid is None:
            return Why(ROW_MASK, f"mask {list(mask.shape)} of {mask.dtype}")
        return self._why_unsupported(q, v)

    def _is_selected(self, site: Site) -> bool:
        if self._selected is not None:
            return site.layer in self._selected
        wanted = self._settings.layers
        return wanted is None or any(
            item == site.layer if isinstance(item, int) else fnmatch.fnmatchcase(site.label, item) for item in wanted
        )

    def dense_steps(self, now: Pass) -> int:
        """How many of the first steps stay dense because the settings say so."""
        share = self._settings.dense_steps
        if isinstance(share, float) and share > 0.0 and now.steps is None:
            raise IntegrationError(
                f"dense_steps={share} is a share of the steps, but their number is unknown; "
                "accelerate the pipeline, or pass scheduler= or steps=, or a whole number of dense_steps"
            )
        return part_of(share, now.steps or 0)

    def _dense_layers(self) -> int:
        share = self._settings.dense_layers
        if isinstance(share, float) and share > 0.0 and self._depth is None:
            raise IntegrationError(
                f"dense_layers={share} is a share of the layers, and this host does not say how many there "
                "are; give a whole number"
            )
        return part_of(share, self._depth or 0)

    def slow_note(self, q: Tensor, v: Tensor) -> str | None:
        """What is to be said about the backend that takes such calls, if it is a slow one."""
        return self._taken.get(_demand(q, v))

    def _why_unsupported(self, q: Tensor, v: Tensor) -> Why | None:
        demand, wanted = _demand(q, v), self._settings.config.backend
        if demand in self._taken:
            return None
        try:
            if q.dtype not in DTYPES:
                raise InputError(f"dtype {q.dtype}")
            backend = choose_backend(wanted, demand)
            self._taken[demand] = slow_note(backend.name, demand) if wanted == "auto" else None
        except (BackendError, InputError) as error:
            if self._unsupported == "stop":
                raise
            return Why(UNSUPPORTED, str(error))
        return None


def _demand(q: Tensor, v: Tensor) -> Demand:
    return Demand(q.device, q.dtype, q.shape[-1], v.shape[-1])
