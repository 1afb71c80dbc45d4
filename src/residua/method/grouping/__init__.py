"""Sorts tokens into groups: response coordinates, k-means, partitioners."""
