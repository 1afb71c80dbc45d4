"""Where an attention call of a host belongs: layer, forward pass, and which tokens are text."""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import InputError

Grid = tuple[int, int, int]  # frames, height, width, in tokens
Ranges = tuple[tuple[int, int], ...]  # (start, stop) pairs


@dataclass(frozen=True)
class Pass:
    """What a host knows about a forward pass: its calls have it in common.

    Args:
        step: The denoising step, from 0. A smaller number than before begins a new run.
        steps: How many steps the run has; None if the host cannot tell.
        branch: The guidance branch ("cond", "uncond"). A tuple of names says that the batch holds several
            branches, in equal parts, in this order.
        run: Any value that differs from one run (one video) to the next.
        grid: Frames, height and width of the video in tokens; None if unknown. Only reported.
        removed: The noise that every step of the run removes (`noise_removed`), for a budget that follows it
            (`residua.method.budget.steps`); empty: every step gets the same.
    """

    step: int = 0
    steps: int | None = None
    branch: str | tuple[str, ...] = ""
    run: Hashable = 0
    grid: Grid | None = None
    removed: tuple[float, ...] = ()

    @property
    def branches(self) -> tuple[str, ...]:
        """The guidance branches that the batch holds."""
        return self.branch if isinstance(self.branch, tuple) else (self.branch,)


@dataclass(frozen=True)
class Site:
    """What a host knows about one self-attention call.

    Args:
        layer: The layer's number; with the branch it identifies the state that is carried from step to step.
        now: The forward pass.
        text_queries: Query rows that are not video, as (start, stop) pairs: they are computed exactly.
        text_keys: Keys that are not video: every query keeps them.
        depth: The layer's position from the input, for `dense_layers`; None: the same as `layer`.
        name: The layer's name in the report; empty: "layer N".
    """

    layer: int
    now: Pass = Pass()
    text_queries: Ranges = ()
    text_keys: Ranges = ()
    depth: int | None = None
    name: str = ""

    @property
    def place(self) -> int:
        """The layer's position from the input."""
        return self.layer if self.depth is None else self.depth

    @property
    def label(self) -> str:
        """The layer's name in messages and in the report."""
        return self.name or f"layer {self.layer}"

    def video_tokens(self, queries: int) -> int:
        """How many of the call's query rows are video.

        Args:
            queries: Query rows of the call.

        Returns:
            Their number.
        """
        return queries - sum(stop - start for start, stop in self.text_queries)

    def check(self, q: Tensor, k: Tensor) -> None:
        """Raises InputError if the site contradicts the tensors.

        Args:
            q: [B, H, Nq, D].
            k: [B, Hkv, Nk, D].
        """
        branches = self.now.branches
        if q.shape[0] % len(branches):
            raise InputError(
                f"{self.label}: a batch of {q.shape[0]} for {len(branches)} branches {branches}; wanted equal parts"
            )
        sides = (("text_queries", self.text_queries, q.shape[2]), ("text_keys", self.text_keys, k.shape[2]))
        for name, ranges, total in sides:
            for start, stop in ranges:
                if not 0 <= start <= stop <= total:
                    raise InputError(
                        f"{self.label}: {name} holds ({start}, {stop}), wanted ranges within 0 and {total}"
                    )


def around(start: int, stop: int, total: int) -> Ranges:
    """The ranges before and after the video tokens `start` to `stop` of `total`: the text."""
    return tuple((low, high) for low, high in ((0, start), (stop, total)) if high > low)


def noise_removed(levels: Sequence[float]) -> tuple[float, ...]:
    """The noise that every step of a flow model removes.

    Args:
        levels: Of noise, one for each step and one after the last.

    Returns:
        Their differences; empty if these are not the levels of a flow model, which lie between 0 and 1:
        elsewhere the same difference means something else.
    """
    if not levels or max(levels) > 1 + 1e-6 or min(levels) < 0:
        return ()
    return tuple(level - after for level, after in itertools.pairwise(levels))
