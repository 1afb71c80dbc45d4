"""The longer primitives of a call in plain torch: any device, bounded memory. `primitives/` says what each
must do, and calls these where a backend has nothing better."""

from .directions import shared_directions
from .grouping import eigh, gather_rows, group_means, kmeans_step, project, second_moment
from .judging import best_candidate, candidate_errors, switch_summary
from .residual_fit import add_affine, fit_residual
from .routing import cell_mass, group_worth, spend
from .rows import attend_rows, central_rows, row_peaks, split_rows
from .summary import choose_slots, group_covariance, pooled_share, slot_means

__all__ = [
    "add_affine",
    "attend_rows",
    "best_candidate",
    "candidate_errors",
    "cell_mass",
    "central_rows",
    "choose_slots",
    "eigh",
    "fit_residual",
    "gather_rows",
    "group_covariance",
    "group_means",
    "group_worth",
    "kmeans_step",
    "pooled_share",
    "project",
    "row_peaks",
    "second_moment",
    "shared_directions",
    "slot_means",
    "spend",
    "split_rows",
    "switch_summary",
]
