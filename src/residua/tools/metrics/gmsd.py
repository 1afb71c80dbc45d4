"""GMSD, a perceptual distance that needs no weights: gradient magnitude similarity deviation (Xue, Zhang, Mou
and Bovik, "Gradient Magnitude Similarity Deviation", IEEE Transactions on Image Processing, 2014).

It compares edges: where two frames have edges of different strength, their similarity falls, and the distance
is how unevenly it falls over the frame. 0 is identical.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError

CONSTANT = 170 / 255**2  # the paper's, for values in [0, 1]
LUMA = (0.299, 0.587, 0.114)
MIN_PIXELS = 6  # half of them must fit a Prewitt window


def gmsd(x: Tensor, y: Tensor) -> Tensor:
    """The distance of two batches of frames, frame by frame.

    Args:
        x: [T, 3, H, W] in [0, 1].
        y: The same shape.

    Returns:
        [T], from 0 (identical) upwards: the standard deviation over all positions where a window fits.
    """
    if min(x.shape[-2:]) < MIN_PIXELS:
        raise InputError(f"frames of {x.shape[-1]} x {x.shape[-2]}: GMSD needs {MIN_PIXELS} pixels")
    a, b = _gradient(x), _gradient(y)
    similarity = (2 * a * b + CONSTANT) / (a.square() + b.square() + CONSTANT)
    return similarity.flatten(1).std(dim=1, correction=0)


def _gradient(frames: Tensor) -> Tensor:
    """Strength of the edges at half the size.  # [T, 1, H/2 - 2, W/2 - 2]"""
    luma = torch.tensor(LUMA, dtype=torch.double, device=frames.device).view(1, 3, 1, 1)
    half = F.avg_pool2d((frames.double() * luma).sum(1, keepdim=True), 2)
    prewitt = torch.tensor([[1.0, 0.0, -1.0]] * 3, dtype=half.dtype, device=half.device) / 3
    across, along = (F.conv2d(half, kernel[None, None]) for kernel in (prewitt, prewitt.T))
    return (across.square() + along.square()).sqrt()
