"""Measurements: ratios inside one process, sparse against dense, with the limit beside them."""
