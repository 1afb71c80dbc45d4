"""Measurements: sparse against dense in one process, with the theoretical limit beside them."""
