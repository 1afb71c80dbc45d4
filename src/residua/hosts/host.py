"""The one place where a host's attention call is made sparse or left dense.

A host (diffusers, ComfyUI, a server) makes one `HostAttention` per transformer and gives it every
self-attention call with a `Site` that says where the call belongs. State, counting and the report are here,
once for all hosts; `dense_reasons.py` decides which calls stay dense.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from ..baselines.methods import DEFAULT, find_method
from ..config import Config
from ..method.budget import SharedBudget, shares_of_steps
from ..method.inputs import key_padding
from .dense_reasons import Answer, DenseReasons, Why
from .log import CallLog
from .padding import PaddingReader
from .settings import ResolvedSettings, min_tokens_for
from .site import Grid, Pass, Site
from .watch import RunWatch

logger = logging.getLogger("residua.hosts")

Dense = Callable[[], Tensor]

FAILED = "error in the sparse call"

_NO_RUN = object()


class HostAttention:
    """Attention of one transformer in a host: `call` for every self-attention call, `report` afterwards.

    Args:
        settings: How it is accelerated; see `Settings.resolve`.
        layers: Names of the self-attention layers, if the host knows them before the first call.
        depths: The position of each of `layers`, counted from the input; None: as they are listed.
        name: What the report calls the transformer.
        model: Its class, for the report.
        family: The model family, for the report.
        preset: Where the settings of the family come from, for the report.
        time_stages: Adds the time of every stage to the report; on CUDA each stage then waits for the device.
        unsupported: What happens to a call that no backend takes: "stop" raises, "dense" counts it as dense.
        on_error: What happens when the sparse call itself fails: "stop" raises, "dense" logs a warning and
            computes it dense.
        lend: Whether the first call of a guidance branch starts from the groups of another branch of its
            layer. Not for hosts that do not always run their branches in the same order: results would depend on it.

    Not safe for two threads at once.
    """

    def __init__(
        self,
        settings: ResolvedSettings,
        *,
        layers: Sequence[str] = (),
        depths: Sequence[int] | None = None,
        name: str = "transformer",
        model: str = "",
        family: str = "",
        preset: str = "",
        time_stages: bool = False,
        unsupported: Answer = "stop",
        on_error: Answer = "stop",
        lend: bool = False,
    ) -> None:
        self.settings = settings
        self.name, self.model, self.family, self.preset = name, model, family, preset
        self.time_stages = time_stages
        self.on_error = on_error
        self.log = CallLog(layers)
        self.dense: Counter[Why] = Counter()  # dense calls by reason, with the numbers that decided
        self.grids: set[Grid] = set()
        self.runs = 0
        self.state_bytes = 0  # the maximum that was carried from step to step
        self._reasons = DenseReasons(settings, layers, depths, unsupported)
        self._method = find_method(settings.method or DEFAULT)
        self._states: dict[tuple[int, str], Any] = {}  # (layer, branch) -> what the method carries
        # the paper's method, which clusters in every call, only starts from its own groups
        self._lend = lend and settings.config.regroup_every > 1
        self.lenders: tuple[HostAttention, ...] = ()  # other transformers of the same run
        self._budget = SharedBudget()  # shared by all layers and branches of a run
        self._padding = PaddingReader()
        self._watch = RunWatch(name)
        self._warnings: list[str] = []  # of earlier runs
        self._run: Hashable = _NO_RUN
        self._step = 0
        self._shares_of: Any = None  # what the configs of the steps were made for
        self._configs: list[Config] = []

    def call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        site: Site,
        dense: Dense,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
        why_dense: str | None = None,
    ) -> Tensor:
        """One self-attention call, sparse or dense.

        Args:
            q: [B, H, Nq, D], after the rotary embedding.
            k: [B, Hkv, Nk, D].
            v: [B, Hkv, Nk, Dv].
            site: Where the call belongs.
            dense: Computes the call as the host would without Residua, [B, H, Nq, Dv].
            mask: The host's attention mask. Boolean key padding ([B, Nk] or [B, 1, 1, Nk], True = valid) is
                understood; with any other mask the call stays dense.
            scale: Factor of the products; None: 1 / sqrt(D).
            why_dense: The host's own reason to leave this call dense, if it has one.

        Returns:
            The output [B, H, Nq, Dv].
        """
        self._follow(site.now)
        valid = None if mask is None else key_padding(mask, q.shape[0])
        why = Why(why_dense) if why_dense is not None else self._reasons.first(q, v, site, mask, valid)
        if why is not None:
            return self._dense(q, k, site, dense, why)
        try:
            return self._sparse(q, k, v, site, mask, scale)
        except BaseException as error:
            self.drop_states()  # half-updated centres must not start a later call
            if self.on_error == "stop" or not isinstance(error, Exception):
                raise
            self._watch.warn(
                "failed", f"{site.label}: {type(error).__name__}: {error}; it runs dense because on_error='dense'"
            )
            return self._dense(q, k, site, dense, Why(FAILED, f"{type(error).__name__}: {error}"))

    def reset(self) -> None:
        """Ends the run: drops what is carried between steps; the next call begins a new run."""
        if self._run is not _NO_RUN:
            self._finish_run()
        self._run = _NO_RUN
        self.drop_states()

    def drop_states(self) -> None:
        """The next sparse call of every layer starts cold."""
        self._states.clear()
        self._budget.reset()
        self._padding = PaddingReader()

    @property
    def warm(self) -> bool:
        """Whether anything is carried to the next step."""
        return bool(self._states)

    def clear(self) -> None:
        """Sets the counters of the report to zero."""
        self.log.clear()
        self.dense.clear()
        self.grids.clear()
        self.runs = self.state_bytes = 0
        self._warnings = []
        self._watch = RunWatch(self.name)

    def read(self) -> None:
        """Reads receipts and timers, and logs once per run what the user should know; waits for the
        device."""
        self.state_bytes = max(self.state_bytes, sum(state.nbytes for state in self._states.values()))
        self._watch.read(self.log.read_receipts())
        self._watch.speak()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of the runs since the last `clear`."""
        return tuple(dict.fromkeys([*self._warnings, *self._watch.warnings]))

    def _follow(self, now: Pass) -> None:
        """Begins a new run when the host says so, or when the step goes back."""
        if self._run is _NO_RUN or now.run != self._run or now.step < self._step:
            if self._run is not _NO_RUN:
                self._finish_run()
            self.runs += 1
            self._run = now.run
            logger.info("%s: run %d begins, %s steps", self.name, self.runs, now.steps or "unknown")
        self._step = now.step
        if now.grid is not None:
            self.grids.add(now.grid)

    def _finish_run(self) -> None:
        self.read()
        self.drop_states()
        self._warnings += self._watch.warnings
        self._watch = RunWatch(self.name)

    def _dense(self, q: Tensor, k: Tensor, site: Site, dense: Dense, why: Why) -> Tensor:
        branch = " + ".join(site.now.branches)
        tally = self.log.at(site.layer, site.label, branch, site.now.step, q.device)
        self.dense[why] += 1
        if self._watch.dense_call(why):
            logger.info("%s: %s stays dense: %s %s", self.name, site.label, why.reason, why.number)
        logger.debug("%s: step %d, %s dense: %s", self.name, site.now.step, site.label, why.reason)
        with tally.dense_call(why.reason, q, k):
            return dense()

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor, site: Site, mask: Tensor | None, scale: float | None) -> Tensor:
        """Every guidance branch has its own state, whether it comes alone or in a batch."""
        site.check(q, k)
        branches = site.now.branches
        valid = None if mask is None else key_padding(mask, q.shape[0])
        if len(branches) > 1:
            size, outputs = q.shape[0] // len(branches), []
            for number, branch in enumerate(branches):
                rows = slice(number * size, (number + 1) * size)
                alone = replace(site, now=replace(site.now, branch=branch))
                part = None if valid is None else valid[rows]  # each has its own padding
                outputs.append(self._sparse(q[rows], k[rows], v[rows], alone, part, scale))
            return torch.cat(outputs)
        state = self._state(site.layer, branches[0])
        tally = self.log.at(site.layer, site.label, branches[0], site.now.step, q.device)
        with tally.sparse_call(q, k) as record:
            compact = None if valid is None or mask is None else self._padding.compact(mask, valid, q.shape[2])
            text_queries, text_keys = site.text_queries, site.text_keys
            if compact is not None and valid is not None:
                q, k, v, valid = compact.take(q), compact.take(k), compact.take(v), compact.take(valid, 1)
                text_queries, text_keys = compact.ranges(text_queries), compact.ranges(text_keys)
            out, receipt = self._method.attend(
                q,
                k,
                v,
                self._config_at(site.now),
                state,
                pinned_keys=list(text_keys) or None,
                exact_queries=list(text_queries) or None,
                key_mask=valid,
                scale=scale,
                grid=site.now.grid,
                time_stages=self.time_stages,
            )
            out = out if compact is None else compact.put_back(out)
            record(receipt)
        self._watch.sparse_call(self._reasons.slow_note(q, v))
        return out

    def _config_at(self, now: Pass) -> Config:
        """The settings of a step: a shared budget spends more where more noise is removed."""
        config = self.settings.config
        if not config.balance or not now.removed:
            return config
        first = min(self._reasons.dense_steps(now), len(now.removed))
        key = (now.removed, first)
        if key != self._shares_of:
            dense, sparse = (1.0,) * first, shares_of_steps(now.removed[first:])
            shares = (*dense, *sparse)
            by_share = {share: config.replace(density=min(1.0, share * config.density)) for share in shares}
            self._shares_of, self._configs = key, [by_share[share] for share in shares]
        return self._configs[now.step] if now.step < len(self._configs) else config

    def _state(self, layer: int, branch: str) -> Any:
        """What this layer carries in this branch; a new one may start from what another carries."""
        if (layer, branch) not in self._states:
            state = self._method.new_state(self._budget)
            if self._lend:
                for lender in (self, *self.lenders):
                    branches = {known: state for (number, known), state in lender._states.items() if number == layer}
                    if branches:
                        self._method.lend(state, branches.get(branch, next(iter(branches.values()))))
                        break
            self._states[layer, branch] = state
        return self._states[layer, branch]

    def settings_dict(self) -> dict[str, Any]:
        """The settings as plain values, with the `min_tokens` that was used."""
        used, layers = self._reasons.min_tokens, self.settings.layers
        return {
            **asdict(self.settings),
            "layers": None if layers is None else list(layers),
            "min_tokens": min_tokens_for(torch.device("cpu")) if used is None else used,
        }
