"""The lab: record real attention calls, then measure sparse attention on them as the paper does."""

from .captures import CapturedCall, read_captures
from .recording import capture, recording
from .writer import CaptureWriter

__all__ = ["CaptureWriter", "CapturedCall", "capture", "read_captures", "recording"]
