"""Triton kernels for NVIDIA GPUs, one per file. Without Triton there is a reason instead of a backend."""

from .backend import TritonBackend

__all__ = ["TritonBackend"]
