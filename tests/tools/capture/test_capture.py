"""Recording: what is written is what the model's attention saw, and the model is left as it was."""

import pytest
import torch

pytest.importorskip("diffusers")

from residua.errors import InputError
from residua.hosts.diffusers import attached
from residua.hosts.diffusers.layer import AttentionLayer
from residua.tools.capture import CaptureWriter, capture, read_captures, recording
from residua.tools.capture.recording import Selection
from tests.support import tiny_models as tiny


@pytest.fixture
def outputs(monkeypatch):
    """What dense attention returned, by layer name."""
    seen: dict[str, torch.Tensor] = {}
    dense = AttentionLayer.dense

    def kept(self, *arguments):
        seen[self.name] = dense(self, *arguments)
        return seen[self.name]

    monkeypatch.setattr(AttentionLayer, "dense", kept)
    return seen


@pytest.mark.parametrize("name", ["wan", "hunyuan", "cogvideox", "mochi"])
@torch.no_grad()
def test_dense_attention_of_a_recorded_head_is_what_the_model_computed(tmp_path, outputs, name):
    builders = {key.lower().replace(" ", ""): key for key in tiny.BUILDERS}
    model, inputs = tiny.build(builders[next(key for key in builders if key.startswith(name))])
    before = model(**inputs)
    writer = CaptureWriter(tmp_path, name)
    with recording(model, writer, Selection(heads=(1,))) as recorder:
        during = model(**inputs)
    assert attached(model) is None and not recorder.skipped
    assert torch.allclose(before[0], during[0], atol=1e-5)
    calls = [call for call in read_captures(tmp_path) if call.branch.endswith(("/0", "call 0"))]
    assert calls and {call.grid for call in calls} == {(3, 8, 8)}
    names = list(outputs)
    for call in calls:
        judged = call.call()
        assert judged.free_queries.count == tiny.VIDEO == judged.free_keys.count
        weights = (judged.scale * judged.q @ judged.k.mT).softmax(-1)
        mine = judged.free_queries.take(weights @ judged.v, 2)[0, 0]
        theirs = outputs[names[call.layer]][0, :, 1]  # [N, D], padding included
        start = 0 if not judged.exact_queries.ranges or judged.exact_queries.ranges[0][0] else None
        theirs = theirs[: tiny.VIDEO] if start == 0 else theirs[-tiny.VIDEO :]
        assert (mine - theirs).norm() <= 5e-3 * theirs.norm()  # stored in half precision


class Loop:
    """A pipeline as far as recording needs one."""

    def __init__(self) -> None:
        self.transformer, self.inputs = tiny.build(next(key for key in tiny.BUILDERS if "wan" in key.lower()))
        self.components = {"transformer": self.transformer}
        self._interrupt = False
        self.ran = 0

    @torch.no_grad()
    def __call__(self, steps: int = 6, seed: int = 0) -> None:
        self._interrupt, self.ran = False, 0
        for step in range(steps):
            if self._interrupt:
                continue
            self.ran += 1
            time = torch.full_like(self.inputs["timestep"], 1000 - 100 * step)
            self.transformer(**{**self.inputs, "timestep": time})


def test_only_the_selection_is_recorded_and_the_run_stops(tmp_path):
    pipe = Loop()
    recorder = capture(pipe, tmp_path, layers=[1], heads=[0], steps=[1, 2])
    calls = read_captures(tmp_path)
    assert {(call.layer, call.head) for call in calls} == {(1, 0)}
    assert sorted({call.step for call in calls}) == [1, 2]
    assert pipe.ran == 4 and not recorder.full and attached(pipe) is None


def test_a_run_that_was_cut_short_goes_on(tmp_path):
    pipe = Loop()
    size = capture(pipe, tmp_path / "a", layers=[0, 1], heads=[0], steps=[0, 1]).writer.bytes
    first = capture(pipe, tmp_path / "b", layers=[0, 1], heads=[0], steps=[0, 1], limit_bytes=size // 2)
    assert first.full and 0 < len(first.writer) < len(read_captures(tmp_path / "a"))
    capture(pipe, tmp_path / "b", layers=[0, 1], heads=[0], steps=[0, 1])
    whole, resumed = read_captures(tmp_path / "a"), read_captures(tmp_path / "b")
    assert sorted(call.name for call in whole) == sorted(call.name for call in resumed)
    with pytest.raises(InputError, match="another run"):
        capture(pipe, tmp_path / "b", steps=[0], seed=5)


@pytest.mark.parametrize(
    "wrong", [{"layers": [99]}, {"heads": [7]}, {"steps": [-1]}, {"limit_bytes": 1}, {"branches": ["nobody"]}]
)
def test_what_cannot_be_recorded_is_refused(tmp_path, wrong):
    pipe = Loop()
    with pytest.raises(InputError):
        capture(pipe, tmp_path / "c", **wrong)
    assert attached(pipe) is None
