"""Runs every line of the example scripts, with stand-ins that accept only what the real functions accept."""

import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock, create_autospec

import diffusers
import diffusers.utils
import pytest
from PIL import Image

import residua
from residua.hosts.diffusers import Handle

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = [
    ("wan22_t2v.py", "WanPipeline", []),
    ("wan22_i2v.py", "WanImageToVideoPipeline", ["first.png", "a cat"]),
    ("wan22_ti2v_5b.py", "WanPipeline", ["a boat"]),
    ("wan22_ti2v_5b.py", "WanImageToVideoPipeline", ["a boat", "first.png"]),
    ("hunyuan_video.py", "HunyuanVideoPipeline", []),
    ("cosmos_predict25.py", "Cosmos2_5_PredictBasePipeline", ["a bus"]),
    ("cosmos_predict25.py", "Cosmos2_5_PredictBasePipeline", ["a bus", "first.png"]),
    ("cosmos_predict25.py", "Cosmos2_5_PredictBasePipeline", ["a bus", "start.mp4"]),
]


def test_every_script_is_run_here() -> None:
    assert {name for name, *_ in RUNS} == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("script, pipeline, arguments", RUNS)
def test_script(
    script: str, pipeline: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    kind = getattr(diffusers, pipeline, None)
    if kind is None:
        pytest.skip(f"diffusers {diffusers.__version__} has no {pipeline}")
    pipe = create_autospec(kind, instance=True)  # a call with an argument that the pipeline lacks raises
    pipe.vae = MagicMock()
    handle = create_autospec(Handle, instance=True)
    handle.report.return_value = "the report"
    accelerate = create_autospec(residua.accelerate, return_value=handle)
    export = create_autospec(diffusers.utils.export_to_video)
    for model in ("AutoencoderKLWan", "HunyuanVideoTransformer3DModel"):
        monkeypatch.setattr(getattr(diffusers, model), "from_pretrained", lambda *args, **kwargs: MagicMock())
    monkeypatch.setattr(kind, "from_pretrained", lambda *args, **kwargs: pipe)
    monkeypatch.setattr(residua, "accelerate", accelerate, raising=False)
    monkeypatch.setattr(diffusers.utils, "export_to_video", export)
    monkeypatch.setattr(diffusers.utils, "load_image", lambda name: Image.new("RGB", (640, 360)))
    monkeypatch.setattr(diffusers.utils, "load_video", lambda name: [Image.new("RGB", (640, 360))])
    monkeypatch.setattr(sys, "argv", [script, *arguments])

    runpy.run_path(str(EXAMPLES / script))

    accelerate.assert_called_once()
    assert accelerate.call_args.args == (pipe,)
    pipe.enable_model_cpu_offload.assert_called_once()
    size = {pipe.call_args.kwargs["height"] % 16, pipe.call_args.kwargs["width"] % 16}
    assert size == {0}
    assert (pipe.call_args.kwargs["num_frames"] - 1) % 4 == 0
    export.assert_called_once()
    assert "the report" in capsys.readouterr().out
