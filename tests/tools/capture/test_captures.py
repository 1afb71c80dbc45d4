"""Captures on disk: what is written comes back, and hostile folders are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from residua.errors import InputError
from residua.tools.capture import CaptureWriter, read_captures
from residua.tools.capture.writer import clear_capture

SHIPPED = Path(__file__).parents[2] / "data" / "captures" / "world"


def head(tokens: int = 24, dim: int = 8, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, dim, generator=generator) for _ in range(3))


def written(folder: Path, **changes: object) -> Path:
    writer = CaptureWriter(folder, "tiny", run={"seed": 1})
    writer.add(*head(), layer=3, head=1, step=2, branch="cond", grid=(2, 3, 4), **changes)
    return folder


def spoil(folder: Path, **changes: object) -> Path:
    """Changes the only entry of the manifest."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["calls"][0].update(changes)
    path.write_text(json.dumps(manifest))
    return folder


def test_what_is_written_comes_back(tmp_path):
    (found,) = read_captures(written(tmp_path / "c", scale=0.5))
    assert (found.model, found.layer, found.head, found.step, found.branch) == ("tiny", 3, 1, 2, "cond")
    assert found.grid == (2, 3, 4) and found.scale == 0.5 and found.text is None and found.tokens == 24
    for got, given in zip(found.load(), head(), strict=True):
        assert got.shape == (1, 1, 24, 8) and got.dtype == torch.float32
        assert torch.equal(got[0, 0], given.half().float())


def test_text_is_pinned_and_exact_in_the_call(tmp_path):
    writer = CaptureWriter(tmp_path, "tiny")
    writer.add(*head(), layer=0, head=0, text=((20, 24),), text_queries=((20, 24),), grid=(5, 2, 2))
    call = read_captures(tmp_path)[0].call()
    assert call.pinned_keys.ranges == ((20, 24),) and call.exact_queries.ranges == ((20, 24),)


def test_values_beyond_half_precision_stay_single(tmp_path):
    q, k, v = head()
    CaptureWriter(tmp_path, "tiny").add(1e6 * q, k, v, layer=0, head=0)
    assert torch.equal(read_captures(tmp_path)[0].load()[0][0, 0], 1e6 * q)


def test_the_limit_is_kept_and_a_second_run_goes_on(tmp_path):
    size = 3 * 24 * 8 * 2
    writer = CaptureWriter(tmp_path, "tiny", limit_bytes=2 * size)
    added = [writer.add(*head(), layer=0, head=number, step=0) for number in range(3)]
    assert added == [True, True, False] and len(read_captures(tmp_path)) == 2
    again = CaptureWriter(tmp_path, "tiny", limit_bytes=4 * size + 4096)
    assert len(again) == 2 and not again.add(*head(), layer=0, head=1, step=0)
    assert again.add(*head(), layer=0, head=2, step=0)
    assert [call.head for call in read_captures(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize(("model", "run"), [("other", {"seed": 1}), ("tiny", {"seed": 2})])
def test_a_folder_of_another_run_is_refused(tmp_path, model, run):
    with pytest.raises(InputError, match="another"):
        CaptureWriter(written(tmp_path / "c"), model, run=run)


def test_two_writers_of_one_folder_keep_each_other_s_calls(tmp_path):
    first, second = CaptureWriter(tmp_path, "a model"), CaptureWriter(tmp_path, "a model")
    q = torch.randn(8, 4)
    for layer in range(3):
        assert first.add(q, q, q, layer=layer, head=0) and second.add(q, q, q, layer=layer, head=1)
    assert not first.add(q, q, q, layer=2, head=1) and first.has(2, 1, None, "")
    assert len(read_captures(tmp_path)) == len(first) == 6 and first.bytes > 6 * 3 * 8 * 4 * 2
    other = CaptureWriter(tmp_path / "new", "a model")
    CaptureWriter(tmp_path / "new", "another model").add(q, q, q, layer=0, head=0)
    with pytest.raises(InputError, match="another model"):
        other.add(q, q, q, layer=1, head=0)


def test_a_folder_with_other_files_is_refused_and_clearing_spares_them(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="no manifest"):
        CaptureWriter(tmp_path, "tiny")
    folder = written(tmp_path / "c")
    (folder / "notes.txt").write_text("mine")
    clear_capture(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_plain_files_are_read_by_their_names(tmp_path):
    q, k, v = head(16)
    save_file({"q": q, "k": k, "v": v}, tmp_path / "net_L4_H2_x.safetensors", {"grid": "4x4", "scale": "0.25"})
    (found,) = read_captures(tmp_path)
    assert (found.model, found.layer, found.head, found.grid) == ("net", 4, 2, (1, 4, 4))
    assert found.scale == 0.25 and found.name == "L4 H2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "../x.safetensors"}, "plain name"),
        ({"file": "/etc/passwd"}, "plain name"),
        ({"file": "gone.safetensors"}, "cannot be read"),
        ({"scale": "0.1"}, "finite number"),
        ({"scale": 1e999}, "finite number"),
        ({"grid": [2, 3, 5]}, "grid"),
        ({"grid": [-2, -3, 4]}, "grid"),
        ({"text": [[0, 99]]}, "text"),
        ({"text": "all"}, "text"),
        ({"head": -1}, "whole numbers"),
        ({"layer": [0]}, "layer"),
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        read_captures(spoil(written(tmp_path / "c"), **changes))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", '{"format": "x"}', '{"calls": 1}'])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"manifest\.json"):
        read_captures(tmp_path)


@pytest.mark.parametrize("name", ["model.pt", "x.pkl", "WEIGHTS.BIN"])
def test_a_pickle_in_the_folder_is_refused_unopened(tmp_path, name):
    folder = written(tmp_path / "c")
    (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(InputError, match="safetensors and JSON only"):
        read_captures(folder)


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path, keep):
    folder = written(tmp_path / "c")
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError):
        read_captures(folder)


def test_a_bloated_header_is_refused(tmp_path):
    folder = written(tmp_path / "c")
    (path,) = folder.glob("*.safetensors")
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(InputError, match="too large, or cut short"):
        read_captures(folder)


def test_links_and_wrong_tensors_are_refused(tmp_path):
    q, k, v = head()
    for number, tensors in enumerate(
        ({"q": q, "k": k}, {"q": q[:, :4], "k": k, "v": v}, {"q": q.int(), "k": k, "v": v}, {"q": q[0], "k": k, "v": v})
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "a_L0_H0.safetensors")
        with pytest.raises(InputError):
            read_captures(folder)
    folder = written(tmp_path / "c")
    (path,) = folder.glob("*.safetensors")
    path.rename(tmp_path / "elsewhere.safetensors")
    path.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(InputError, match="a link"):
        read_captures(folder)


def test_the_shipped_capture_is_small_and_sound():
    calls = read_captures(SHIPPED)
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 1 << 20
    assert len(calls) >= 4 and len({call.layer for call in calls}) > 1 and len({call.step for call in calls}) > 1
    for call in calls:
        assert call.grid is not None and call.tokens <= 1024
        assert all(bool(torch.isfinite(x).all()) for x in call.load())
