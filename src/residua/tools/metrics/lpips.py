"""LPIPS v0.1 with AlexNet. Its weights do not come with Residua: they are read from a safetensors file of the
user's, or from the `lpips` and `torchvision` packages if these are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...errors import InputError

# AlexNet's convolutions: weight shape, stride, padding. A max-pool comes before the second and the third.
CONVOLUTIONS = (
    ((64, 3, 11, 11), 4, 2),
    ((192, 64, 5, 5), 1, 2),
    ((384, 192, 3, 3), 1, 1),
    ((256, 384, 3, 3), 1, 1),
    ((256, 256, 3, 3), 1, 1),
)
POOL_BEFORE = (1, 2)
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)
MIN_PIXELS = 31  # in smaller frames nothing is left after the second pooling
MAX_FILE_BYTES = 64 << 20
NO_WEIGHTS = (
    "no LPIPS weights: give a safetensors file (--lpips, or lpips in the suite), "
    "or install the packages lpips and torchvision"
)

Distance = Callable[[Tensor, Tensor], Tensor]  # two batches [T, 3, H, W] in [-1, 1] -> [T, ...]


class Lpips:
    """Perceptual distance of two batches of frames [T, 3, H, W] in [0, 1] -> [T]."""

    def __init__(self, distance: Distance, source: str) -> None:
        self._distance = distance
        self.source = source

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if min(x.shape[-2:]) < MIN_PIXELS:
            raise InputError(f"frames of {x.shape[-1]} x {x.shape[-2]}: LPIPS needs {MIN_PIXELS} pixels")
        return self._distance(2 * x.float() - 1, 2 * y.float() - 1).flatten()

    @classmethod
    def from_file(cls, path: str | Path) -> Lpips:
        """Weights as `conv0..4.weight`, `conv0..4.bias` and `lin0..4` (or `lin0..4.weight`)."""
        return cls(AlexDistance(_read(Path(path))), "file")

    @classmethod
    def from_packages(cls) -> Lpips:
        """The network of the `lpips` package."""
        missing = _missing()
        if missing:
            raise InputError(f"LPIPS: {' and '.join(missing)} not installed; {NO_WEIGHTS}")
        import lpips

        return cls(lpips.LPIPS(net="alex", version="0.1", verbose=False).eval(), "lpips package")


def find_lpips(path: str | Path | None = None) -> Lpips | str:
    """LPIPS from the file, else from the packages, else the reason why it cannot be measured."""
    if path is not None:
        return Lpips.from_file(path)
    if _missing():
        return NO_WEIGHTS
    try:
        return Lpips.from_packages()
    except (ImportError, OSError, RuntimeError) as error:  # incompatible packages, or no download
        return f"the lpips package failed: {error}"


def _missing() -> list[str]:
    return [name for name in ("lpips", "torchvision") if importlib.util.find_spec(name) is None]


class AlexDistance:
    """Differences of unit-normalised features at five depths, weighted per channel, averaged over
    positions."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Two batches [T, 3, H, W] in [-1, 1] -> [T]."""
        total = torch.zeros(len(x), device=x.device)
        for depth, (a, b) in enumerate(zip(self._features(x), self._features(y), strict=True)):
            lin = self._weights[f"lin{depth}"].to(x.device)  # [C]
            difference = (_unit(a) - _unit(b)).square()  # [T, C, h, w]
            total = total + torch.einsum("tchw,c->thw", difference, lin).mean(dim=(1, 2))
        return total

    def _features(self, x: Tensor) -> list[Tensor]:
        shift, scale = (torch.tensor(v, device=x.device).view(1, 3, 1, 1) for v in (SHIFT, SCALE))
        x = (x - shift) / scale
        features = []
        for depth, (_, stride, padding) in enumerate(CONVOLUTIONS):
            if depth in POOL_BEFORE:
                x = F.max_pool2d(x, kernel_size=3, stride=2)
            weight, bias = (self._weights[f"conv{depth}.{part}"].to(x.device) for part in ("weight", "bias"))
            x = F.conv2d(x, weight, bias, stride=stride, padding=padding).relu()
            features.append(x)
        return features


def _unit(x: Tensor) -> Tensor:
    return x / (x.norm(dim=1, keepdim=True) + 1e-10)


def _read(path: Path) -> dict[str, Tensor]:
    """The weights, with every name, shape and value checked before they are used."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InputError(f"{path}: {size} bytes; LPIPS weights take less than {MAX_FILE_BYTES}")
        found = load_file(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); {NO_WEIGHTS}") from error
    except SafetensorError as error:
        raise InputError(f"{path}: not a safetensors file ({error})") from error
    wanted: dict[str, tuple[int, ...]] = {}
    for depth, (shape, _, _) in enumerate(CONVOLUTIONS):
        wanted |= {f"conv{depth}.weight": shape, f"conv{depth}.bias": shape[:1], f"lin{depth}": shape[:1]}
    return {name: _checked(path, found, name, shape) for name, shape in wanted.items()}


def _checked(path: Path, found: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = found.get(name, found.get(f"{name}.weight"))
    if tensor is None:
        raise InputError(f"{path}: no tensor {name!r}; wanted conv0..4.weight, conv0..4.bias and lin0..4")
    # A channel weight may be stored as a 1 x 1 convolution.
    squeezed = tuple(tensor.shape) if name.startswith("conv") else (tensor.numel(),)
    if squeezed != shape:
        raise InputError(f"{path}: {name} has shape {list(tensor.shape)}; wanted {list(shape)}")
    tensor = tensor.float().reshape(shape)
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"{path}: NaN or Inf in {name}")
    return tensor
