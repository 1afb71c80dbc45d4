"""PSNR, SSIM and LPIPS against direct computations, and everything that cannot be measured."""

import json
import math
import pickle
import sys
import types

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from residua.errors import InputError
from residua.tools.metrics import lpips as lpips_module
from residua.tools.metrics import video_quality as metrics
from residua.tools.metrics.vbench import vbench, vbench_clip


def clip(seed: int, shape: tuple[int, ...] = (2, 14, 13, 3)) -> np.ndarray:
    return np.random.default_rng(seed).random(shape).astype(np.float32)


def test_psnr_of_a_known_difference():
    video = np.full((3, 8, 8, 3), 0.5, np.float32)
    assert metrics.psnr(video + 0.1, video) == pytest.approx(20.0, abs=1e-4)
    assert math.isinf(metrics.psnr(video, video))


def test_psnr_of_a_video_is_never_above_the_mean_of_its_frames():
    video, reference = clip(0), clip(1)
    reference[0] = video[0] + 1e-3
    assert metrics.psnr(video, reference) <= np.mean(metrics.quality(video, reference, "no").psnr_per_frame)


def direct_ssim(x: np.ndarray, y: np.ndarray) -> float:
    """One channel, window by window, as the definition says."""
    offset = np.arange(11) - 5
    window = np.exp(-(offset[:, None] ** 2 + offset[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for i in range(x.shape[0] - 10):
        for j in range(x.shape[1] - 10):
            a, b = x[i : i + 11, j : j + 11], y[i : i + 11, j : j + 11]
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a, var_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
            covariance = (window * (a - mean_a) * (b - mean_b)).sum()
            values.append(
                (2 * mean_a * mean_b + 0.01**2)
                * (2 * covariance + 0.03**2)
                / ((mean_a**2 + mean_b**2 + 0.01**2) * (var_a + var_b + 0.03**2))
            )
    return float(np.mean(values))


def test_ssim_equals_the_definition():
    video = clip(2)
    reference = (0.7 * video + 0.3 * clip(3)).astype(np.float32)
    expected = np.mean(
        [
            direct_ssim(video[t, ..., c].astype(float), reference[t, ..., c].astype(float))
            for t in range(2)
            for c in range(3)
        ]
    )
    assert metrics.quality(video, reference, "no").ssim == pytest.approx(expected, abs=1e-9)
    assert metrics.quality(video, video, "no").ssim == pytest.approx(1.0)


def direct_gmsd(x: np.ndarray, y: np.ndarray) -> float:
    """As the paper writes it, place by place.  # [H, W, 3]"""
    luma = np.array([0.299, 0.587, 0.114])
    windows = np.array([[1, 0, -1]] * 3) / 3
    strengths = []
    for image in (x @ luma, y @ luma):
        half = image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2]
        half = half.reshape(half.shape[0] // 2, 2, half.shape[1] // 2, 2).mean((1, 3))
        strengths.append(
            [
                np.hypot((half[i : i + 3, j : j + 3] * windows).sum(), (half[i : i + 3, j : j + 3] * windows.T).sum())
                for i in range(half.shape[0] - 2)
                for j in range(half.shape[1] - 2)
            ]
        )
    a, b = map(np.array, strengths)
    return float(((2 * a * b + 170 / 255**2) / (a**2 + b**2 + 170 / 255**2)).std())


def test_gmsd_equals_the_definition():
    video = clip(2)
    reference = (0.7 * video + 0.3 * clip(3)).astype(np.float32)
    expected = np.mean([direct_gmsd(a.astype(float), b.astype(float)) for a, b in zip(video, reference, strict=True)])
    found = metrics.quality(video, reference, "no weights")
    assert found.gmsd == pytest.approx(expected, abs=1e-9) and expected > 0.01
    assert metrics.quality(video, video, "no weights").gmsd == 0
    assert "GMSD needs 6" in metrics.quality(video[:, :4], reference[:, :4], "no").not_measured["gmsd"]


def test_many_frames_are_averaged_over_their_parts():
    video, reference = clip(4, (11, 12, 12, 3)), clip(5, (11, 12, 12, 3))
    single = [metrics.quality(video[t : t + 1], reference[t : t + 1], "no").ssim for t in range(11)]
    assert metrics.quality(video, reference, "no").ssim == pytest.approx(np.mean(single))


def test_bytes_floats_and_tensors_are_the_same_video():
    pixels = np.random.default_rng(6).integers(0, 256, (2, 12, 12, 3), dtype=np.uint8)
    other = clip(7, (2, 12, 12, 3))
    expected = metrics.psnr(pixels, other)
    assert metrics.psnr(pixels / np.float32(255), other) == pytest.approx(expected)
    assert metrics.psnr(torch.from_numpy(pixels), torch.from_numpy(other)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "video, message",
    [
        (np.zeros((2, 12, 12)), "wanted \\[frames"),
        (np.zeros((2, 12, 12, 4)), "wanted \\[frames"),
        (np.zeros((0, 12, 12, 3)), "wanted \\[frames"),
        (np.zeros((2, 12, 12, 3), dtype=np.int64), "wanted floats"),
        (np.full((2, 12, 12, 3), np.nan, np.float32), "NaN"),
        (np.zeros((3, 12, 12, 3), np.float32), "the same frames"),
    ],
)
def test_videos_that_cannot_be_compared(video, message):
    with pytest.raises(InputError, match=message):
        metrics.psnr(video, np.zeros((2, 12, 12, 3), np.float32))


def test_small_frames_have_no_ssim_and_say_why():
    found = metrics.quality(clip(0, (1, 8, 8, 3)), clip(1, (1, 8, 8, 3)), "no weights")
    assert found.psnr is not None and found.ssim is None and found.lpips is None
    assert "11 x 11" in found.not_measured["ssim"] and found.not_measured["lpips"] == "no weights"


def test_identical_videos_have_no_finite_psnr_and_valid_json():
    found = metrics.quality(clip(0), clip(0), "no weights")
    assert found.psnr is None and "identical" in found.not_measured["psnr"]
    assert found.psnr_per_frame == (None, None)
    json.dumps(found.to_dict(), allow_nan=False)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for depth, (shape, _, _) in enumerate(lpips_module.CONVOLUTIONS):
        fan = math.prod(shape[1:])
        made[f"conv{depth}.weight"] = torch.randn(shape, generator=generator) / fan**0.5
        made[f"conv{depth}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)
        made[f"lin{depth}.weight"] = torch.rand((1, shape[0], 1, 1), generator=generator)
    return made


@pytest.fixture(scope="module")
def network_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("lpips") / "alex.safetensors"
    save_file(weights(), path)
    return path


def layered_lpips(x: torch.Tensor, y: torch.Tensor) -> float:
    """AlexNet as torch layers, the distance as in the definition of LPIPS."""
    made = weights()
    slices = []
    for depth, (shape, stride, padding) in enumerate(lpips_module.CONVOLUTIONS):
        convolution = nn.Conv2d(shape[1], shape[0], shape[2], stride, padding)
        convolution.load_state_dict({"weight": made[f"conv{depth}.weight"], "bias": made[f"conv{depth}.bias"]})
        slices.append(nn.Sequential(*([nn.MaxPool2d(3, 2)] if depth in (1, 2) else []), convolution, nn.ReLU()))
    scaled = [
        (2 * z - 1 - torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1))
        / torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1)
        for z in (x, y)
    ]
    total = 0.0
    with torch.no_grad():
        for depth, part in enumerate(slices):
            scaled = [part(z) for z in scaled]
            a, b = (z / z.square().sum(1, keepdim=True).sqrt().clamp(min=1e-10) for z in scaled)
            total += float(nn.functional.conv2d((a - b).square(), made[f"lin{depth}.weight"]).mean())
    return total


def test_lpips_equals_the_layers(network_file):
    network = metrics.Lpips.from_file(network_file)
    x, y = (torch.from_numpy(clip(seed, (2, 40, 36, 3))).permute(0, 3, 1, 2) for seed in (8, 9))
    assert float(network(x, y).mean()) == pytest.approx(layered_lpips(x, y), rel=1e-4)
    assert network(x, x).abs().max() < 1e-6
    found = metrics.quality(clip(8, (2, 40, 36, 3)), clip(9, (2, 40, 36, 3)), network)
    assert found.lpips == pytest.approx(layered_lpips(x, y), rel=1e-4) and not found.not_measured


def test_lpips_of_small_frames_is_not_measured(network_file):
    found = metrics.quality(clip(0), clip(1), metrics.Lpips.from_file(network_file))
    assert found.lpips is None and "31 pixels" in found.not_measured["lpips"]


def broken(name, path):
    made = weights()
    if name == "pickle":
        path.write_bytes(pickle.dumps(made))
    elif name == "truncated":
        save_file(made, path)
        path.write_bytes(path.read_bytes()[:5000])
    else:
        if name == "missing":
            del made["conv3.bias"]
        elif name == "shape":
            made["lin2.weight"] = torch.zeros(5)
        elif name == "nan":
            made["conv0.bias"][3] = float("nan")
        save_file(made, path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("pickle", "not a safetensors"),
        ("truncated", "not a safetensors"),
        ("missing", "no tensor 'conv3.bias'"),
        ("shape", "lin2 has shape"),
        ("nan", "NaN or Inf in conv0.bias"),
    ],
)
def test_broken_weights_are_refused(name, message, tmp_path):
    path = tmp_path / "weights"
    broken(name, path)
    with pytest.raises(InputError, match=message):
        metrics.Lpips.from_file(path)


def test_weights_that_are_too_large_or_absent_are_refused(network_file, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="cannot be read"):
        metrics.Lpips.from_file(tmp_path / "nothing")
    monkeypatch.setattr(lpips_module, "MAX_FILE_BYTES", 100)
    with pytest.raises(InputError, match="bytes"):
        metrics.Lpips.from_file(network_file)


def pretend_packages(monkeypatch, present: bool, **modules):
    spec = types.SimpleNamespace(origin=None) if present else None
    monkeypatch.setattr(lpips_module.importlib.util, "find_spec", lambda name: spec)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_without_weights_the_reason_is_returned(monkeypatch):
    pretend_packages(monkeypatch, present=False)
    assert "--lpips" in metrics.find_lpips()
    with pytest.raises(InputError, match="not installed"):
        metrics.Lpips.from_packages()


def test_the_lpips_package_is_used_where_it_is_installed(monkeypatch):
    class Network(nn.Module):
        def __init__(self, net, version, verbose):
            super().__init__()
            assert (net, version) == ("alex", "0.1")

        def forward(self, x, y):
            return (x - y).abs().mean(dim=(1, 2, 3), keepdim=True)

    pretend_packages(monkeypatch, present=True, lpips=types.SimpleNamespace(LPIPS=Network))
    network = metrics.find_lpips()
    x = torch.zeros(2, 3, 32, 32)
    assert network(x, x + 0.5).tolist() == [1.0, 1.0]  # in [-1, 1], distances double


def test_vbench_is_not_measured_where_it_is_not_installed(tmp_path, monkeypatch):
    video = tmp_path / "video.mp4"
    with pytest.raises(InputError, match="no such file"):
        vbench(video)
    video.write_bytes(b"")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in vbench(video)


def test_vbench_scores_are_read_back(tmp_path, monkeypatch):
    class VBench:
        def __init__(self, device, descriptions, folder):
            assert descriptions.endswith("VBench_full_info.json")
            self.folder = folder

        def evaluate(self, videos_path, name, dimension_list, mode):
            assert mode == "custom_input"
            results = {dimension: [0.5, []] for dimension in dimension_list}
            (tmp_path.__class__(self.folder) / f"{name}_eval_results.json").write_text(json.dumps(results))

    video = tmp_path / "video.mp4"
    video.write_bytes(b"")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: types.SimpleNamespace(origin="/vtools/bench/__init__.py")
    )
    monkeypatch.setitem(sys.modules, "vbench", types.SimpleNamespace(VBench=VBench))
    assert vbench(video) == {"imaging_quality": 0.5, "subject_consistency": 0.5}
    assert vbench_clip(b"video", "cpu") == vbench(video)

    def failing(self, **_):
        raise RuntimeError("no GPU")

    monkeypatch.setattr(VBench, "evaluate", failing)
    assert "no GPU" in vbench(video)
    monkeypatch.setattr(VBench, "evaluate", lambda self, **_: None)
    assert "no results" in vbench(video)
