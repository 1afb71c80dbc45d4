"""Numbers that every version of a primitive shares: plain torch, C++ and Triton."""

MIN_RMS = 1e-6  # by which a row is divided at least
MIN_SPREAD = 1e-4  # of a group, as a share of the mean over the groups of its head
MIN_VARIANCE = 1e-4  # of the mean variance of the keys, so that their covariance can be inverted
FILL_PASSES = 4  # how often the rest of a budget is offered to the cells that were passed over

# The residual fit
FEATURE_EPS = 1e-6  # inside the root of the feature scale
MAX_LEVERAGE = 0.9  # above it a probe decides its own fit and says little (docs/decisions/0003-error-estimate.md)
MIN_ENERGY = 1e-12  # of the largest: below it a direction of the residuals carries nothing

# Orthogonal iteration (`subspace.py`)
SUBSPACE_STEPS = 12
SUBSPACE_SHIFT = 1e-6  # of the largest entry: keeps every direction alive, and the Cholesky factors well conditioned
