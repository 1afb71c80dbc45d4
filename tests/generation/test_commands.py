"""`residua demo`, `generate` and `compare`: what they write, what they refuse, how they end."""

from __future__ import annotations

import json
import resource

import pytest
from PIL import Image

pytest.importorskip("typer")
from typer.testing import CliRunner

from residua.cli import app
from residua.generation import page
from residua.generation.files import MARKER

PROMPT = "a red circle moving right on a grey background"
TINY = ("--size", "16", "--frames", "8", "--steps", "2")


def run(*arguments):
    return CliRunner().invoke(app, [str(part) for part in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_demo_writes_its_folder_and_may_run_again(weights, elsewhere):
    for _ in range(2):
        found = run("demo", "--model", weights, "--density", "0.5", *TINY)
        assert found.exit_code == 0, found.output
    for word in ("speed-up", "PSNR", "128 video tokens", "not measured", "report.html"):
        assert word in found.output
    assert listing(elsewhere) == ["residua-demo"]
    assert listing(elsewhere / "residua-demo") == sorted(
        [
            MARKER,
            "contact-sheet.png",
            "dense.mp4",
            "report.html",
            "report.json",
            "side-by-side.webp",
            "sparse.mp4",
        ]
    )
    facts = json.loads((elsewhere / "residua-demo" / "report.json").read_text())
    assert facts["prompt"] == PROMPT and facts["lpips"] is None and facts["psnr"] > 0
    assert facts["settings"][0]["config"]["density"] == 0.5


def test_demo_without_dense_replaces_the_older_results(weights, elsewhere):
    assert run("demo", "--model", weights, *TINY).exit_code == 0
    found = run("demo", "--model", weights, "--no-dense", "--repair", "none", *TINY)
    assert found.exit_code == 0, found.output
    assert "dense.mp4" not in listing(elsewhere / "residua-demo")
    facts = json.loads((elsewhere / "residua-demo" / "report.json").read_text())
    assert facts["speedup"] is None and facts["error"] is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--prompt", "<script>alert(1)</script>"), "prompt"),
        (("--density", "0"), "Config.density"),
        (("--density", "nan"), "Config.density"),
        (("--size", "18"), "multiples of 4"),
        (("--size", "big"), "wanted one number"),
        (("--repair", "magic"), "Config.repair"),
        (("--dense-steps", "many"), "--dense-steps"),
        (("--dense-steps", "1.5"), "dense_steps"),
        (("--lpips", "nothing.safetensors"), "cannot be read"),
        (("--model", "nowhere/at/all"), "no such folder"),
    ],
)
def test_demo_refuses_with_a_sentence_and_writes_nothing(arguments, message, weights, elsewhere):
    model = () if "--model" in arguments else ("--model", weights)
    found = run("demo", *model, *TINY, *arguments)
    assert found.exit_code == 2 and message in found.output and "Traceback" not in found.output
    assert listing(elsewhere) == []


def test_demo_does_not_touch_what_it_did_not_write(weights, elsewhere):
    out = elsewhere / "residua-demo"
    out.mkdir()
    (out / "report.html").write_text("mine")
    found = run("demo", "--model", weights, *TINY)
    assert found.exit_code == 2 and "--force" in found.output and (out / "report.html").read_text() == "mine"
    link = elsewhere / "link"
    link.symlink_to(out)
    assert run("demo", "--model", weights, "--out", link, "--force", *TINY).exit_code == 2
    assert run("demo", "--model", weights, "--force", *TINY).exit_code == 0
    assert (out / "report.html").read_text() != "mine"
    assert run("demo", "--model", weights, "--out", out, *TINY).exit_code == 2  # only the default is reused


def test_ctrl_c_ends_with_130_and_no_files(weights, elsewhere, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(page, "encode_webp", interrupted)
    found = run("demo", "--model", weights, *TINY)
    assert found.exit_code == 130 and "stopped" in found.output and listing(elsewhere) == []


def test_a_full_disk_ends_with_an_error_and_no_files(weights, elsewhere):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        found = run("demo", "--model", weights, *TINY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found.exit_code == 2 and "could not be written" in found.output and listing(elsewhere) == []


def test_generate_writes_one_video(weights, elsewhere):
    found = run(
        "generate", "--model", weights, "--prompt", PROMPT, "--out", "v.mp4", "--min-tokens", "0", *TINY
    )
    assert found.exit_code == 0, found.output
    assert listing(elsewhere) == ["v.mp4"] and (elsewhere / "v.mp4").read_bytes()[4:8] == b"ftyp"
    again = run("generate", "--model", weights, "--prompt", PROMPT, "--out", "v.mp4", *TINY)
    assert again.exit_code == 2 and "--force" in again.output


def test_generate_compares_from_an_image(weights, elsewhere):
    Image.new("RGB", (16, 16), "red").save(elsewhere / "first.png")
    (elsewhere / "settings.toml").write_text("density = 0.5\nprobes = 8\n")
    found = run(
        "generate", "--model", weights, "--prompt", PROMPT, "--out", "v.mp4", "--compare",
        "--image", "first.png", "--config", "settings.toml", "--dense-steps", "0", "--min-tokens", "0",
        "--guidance", "2", "--vbench", *TINY,
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert {"v.mp4", "v.dense.mp4", "v.report.html", "v.report.json"} <= set(listing(elsewhere))
    facts = json.loads((elsewhere / "v.report.json").read_text())
    assert facts["settings"][0]["config"]["probes"] == 8 and facts["settings"][0]["config"]["density"] == 0.5
    assert facts["sparse_calls_per_layer"][1] == 4  # two steps, two branches
    assert facts["vbench"] is None and "not installed" in facts["not_measured"]["vbench"]
    assert "VBench was not measured" in found.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--out", "v.avi"), "ends in .mp4"),
        (("--image", "nothing.png"), "--image"),
        (("--dtype", "int8"), "dtype"),
        (("--offload", "model", "--device", "cpu"), "needs a GPU"),
        (("--device", "abacus"), "device="),
        (("--negative-prompt", "x"), "takes no negative_prompt"),
    ],
)
def test_generate_refuses(arguments, message, weights, elsewhere):
    found = run("generate", "--model", weights, "--prompt", PROMPT, *TINY, *arguments)
    assert found.exit_code == 2 and message in found.output and listing(elsewhere) == []


def test_generate_without_network_or_model_says_what_to_do(monkeypatch, elsewhere):
    import diffusers

    def unreachable(name, **options):
        assert options["use_safetensors"] is True
        raise OSError("Cannot reach the hub\nwith details")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", unreachable)
    found = run("generate", "--model", "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "--prompt", "a cat")
    assert found.exit_code == 2
    for word in ("cannot be loaded", "Cannot reach the hub", "hf download", "--model mini"):
        assert word in " ".join(found.output.split())
    assert "with details" not in found.output and listing(elsewhere) == []


def test_compare_writes_table_json_and_plot(weights, elsewhere):
    found = run(
        "compare", "--model", weights, "--densities", "0.3,0.6", "--partitions", "semantic,response",
        "--repairs", "none,probe", "--min-tokens", "0", "--dense-steps", "0", *TINY,
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    out = elsewhere / "residua-compare"
    assert listing(out) == [MARKER, "compare.json", "compare.md", "compare.png"]
    facts = json.loads((out / "compare.json").read_text())
    rows = facts["rows"]
    assert len(rows) == 1 + 8 and rows[0]["partition"] == "dense" and rows[0]["density"] == 1.0
    assert {(r["partition"], r["repair"], r["target"]) for r in rows[1:]} == {
        (p, r, d) for p in ("semantic", "response") for r in ("none", "probe") for d in (0.3, 0.6)
    }
    assert all(row["psnr"] and row["ssim"] and row["pflops"] and row["lpips"] is None for row in rows[1:])
    table = (out / "compare.md").read_text()
    assert table.count("\n| ") == 1 + 9 and "LPIPS was not measured" in table
    Image.open(out / "compare.png").verify()
    assert run("compare", "--model", weights).exit_code == 2  # the folder is taken


@pytest.mark.parametrize(
    "arguments, message",
    [(("--densities", "a"), "wanted numbers"), (("--densities", ","), "at least one"),
     (("--partitions", "psychic"), "Config.partition"), (("--repairs", "magic"), "Config.repair")],
)  # fmt: skip
def test_compare_refuses(arguments, message, weights, elsewhere):
    found = run("compare", "--model", weights, *TINY, *arguments)
    assert found.exit_code == 2 and message in found.output and listing(elsewhere) == []
