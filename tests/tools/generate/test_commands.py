"""`residua demo`, `generate` and `compare`: what they write, what they refuse, how they end."""

import inspect
import json
import re
import resource

import pytest
from PIL import Image

pytest.importorskip("typer")
from residua.errors import InputError
from residua.hosts.diffusers import QUALITIES
from residua.tools.cli.compare import held_out
from residua.tools.cli.summary import busy
from residua.tools.generate import page
from residua.tools.output import MARKER
from residua.world.held_out import DEMO_PROMPT as PROMPT
from residua.world.held_out import REPORT_PROMPTS, SEEDS, TUNING_PROMPTS
from tests.support.command import run

TINY = ("--size", "16", "--frames", "8", "--steps", "2")


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
    for word in ("speed-up", "PSNR", "128 video tokens", "not measured: lpips", "report.html"):
        assert word in found.output
    assert listing(elsewhere) == ["residua-demo"]
    assert listing(elsewhere / "residua-demo") == sorted(
        [MARKER, "contact-sheet.png", "dense.mp4", "report.html", "report.json", "side-by-side.webp", "sparse.mp4"]
    )
    facts = json.loads((elsewhere / "residua-demo" / "report.json").read_text())
    assert facts["prompt"] == PROMPT and facts["lpips"] is None and facts["floor"]["psnr"] > facts["psnr"] > 0
    assert "PSNR, dB (dense: the noise floor)" in found.output
    assert "Noise floor: " in (elsewhere / "residua-demo" / "report.html").read_text()
    assert facts["settings"][0]["config"]["density"] == 0.5
    assert facts["settings"][0]["config"]["reconstruction"] == "anchored"
    assert facts["cost"] > facts["density"] > 0 and facts["error"] > 0 and facts["quality"] is None


def test_demo_with_a_quality(weights, elsewhere):
    found = run("demo", "--model", weights, "--quality", "balanced", "--no-dense", *TINY)
    assert found.exit_code == 0, found.output
    facts = json.loads((elsewhere / "residua-demo" / "report.json").read_text())
    config = facts["settings"][0]["config"]
    assert facts["quality"] == facts["settings"][0]["quality"] == "balanced"
    assert (config["max_error"], config["density"]) == (QUALITIES["balanced"].max_error, QUALITIES["balanced"].density)
    assert "quality balanced" in (elsewhere / "residua-demo" / "report.html").read_text()


def test_demo_with_an_error_bound_that_nothing_keeps(weights, elsewhere):
    found = run("demo", "--model", weights, "--max-error", "1e-9", "--density", "0.5", "--no-dense", *TINY)
    assert found.exit_code == 0, found.output
    facts = json.loads((elsewhere / "residua-demo" / "report.json").read_text())
    assert facts["dense_heads"] == facts["chosen"]["dense"] == sum(facts["chosen"].values()) > 0
    assert "heads dense because of max error" in found.output
    assert (facts["settings"][0]["config"]["max_error"], facts["quality"]) == (1e-9, None)


def test_demo_without_dense_replaces_the_older_results(weights, elsewhere):
    assert run("demo", "--model", weights, *TINY).exit_code == 0
    found = run("demo", "--model", weights, "--no-dense", "--reconstruction", "none", *TINY)
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
        (("--max-error", "0"), "Config.max_error"),
        (("--max-error", "0.1", "--reconstruction", "probe"), "needs an error estimate"),
        (("--quality", "best"), "wanted one of 'faithful', 'balanced', 'fast'"),
        (("--quality", "fast", "--density", "0.3"), "together with --density"),
        (("--quality", "fast", "--max-error", "0.3", "--reconstruction", "none"), "with --max-error, --reconstruction"),
        (("--size", "18"), "multiples of 4"),
        (("--size", "big"), "wanted one number"),
        (("--reconstruction", "magic"), "Config.reconstruction"),
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


def test_a_path_that_leaves_the_folder_is_a_path_like_any_other(weights, elsewhere, monkeypatch):
    """It is the user's own: nothing there is overwritten without --force."""
    inside = elsewhere / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    (elsewhere / "x").mkdir()
    (elsewhere / "x" / "report.html").write_text("mine")
    found = run("demo", "--model", weights, "--out", "../../x", *TINY)
    assert found.exit_code == 2 and "--force" in found.output
    assert listing(elsewhere / "x") == ["report.html"] and listing(inside) == []
    assert (elsewhere / "x" / "report.html").read_text() == "mine"


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
    found = run("generate", "--model", weights, "--prompt", PROMPT, "--out", "v.mp4", "--min-tokens", "0", *TINY)
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


def test_generate_takes_method_options_over_the_preset_or_a_file(weights, elsewhere):
    (elsewhere / "settings.toml").write_text("density = 0.5\nprobes = 8\n")
    over_a_file = ("--config", "settings.toml", "--max-error", "0.5", "--reconstruction", "tail")
    for number, options in enumerate((over_a_file, ("--reconstruction", "none"), ("--quality", "fast"))):
        found = run(
            "generate",
            "--model",
            weights,
            "--prompt",
            PROMPT,
            "--out",
            f"{number}.mp4",
            "--compare",
            "--dense-steps",
            "0",
            "--min-tokens",
            "0",
            *options,
            *TINY,
        )
        assert found.exit_code == 0, found.output
    read = [json.loads((elsewhere / f"{number}.report.json").read_text()) for number in range(3)]
    one, two, three = (facts["settings"][0]["config"] for facts in read)
    assert (one["density"], one["probes"], one["max_error"], one["reconstruction"]) == (0.5, 8, 0.5, "tail")
    assert (two["density"], two["max_error"], two["reconstruction"]) == (0.22, None, "none")
    assert (three["max_error"], read[2]["quality"]) == (QUALITIES["fast"].max_error, "fast")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--quality", "fast", "--config", "x.toml"), "together with --config"),
        (("--max-error", "2"), "Config.max_error"),
        (("--reconstruction", "magic"), "Config.reconstruction"),
        (("--out", "v.avi"), "ends in .mp4"),
        (("--image", "nothing.png"), "--image"),
        (("--dtype", "int8"), "dtype"),
        (("--offload", "model", "--device", "cpu"), "needs a GPU"),
        (("--device", "abacus"), "device="),
        (("--device", "cuda:99"), "CUDA device"),
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
    for word in ("cannot be loaded", "Cannot reach the hub", "hf download", "--model world"):
        assert word in " ".join(found.output.split())
    assert "with details" not in found.output and listing(elsewhere) == []


@pytest.mark.slow
def test_compare_writes_table_json_and_plot(weights, elsewhere):
    found = run(
        "compare",
        "--model",
        weights,
        "--densities",
        "0.3,0.6",
        "--partitions",
        "semantic,response",
        "--reconstructions",
        "none,probe",
        "--min-tokens",
        "0",
        "--dense-steps",
        "0",
        *TINY,
    )
    assert found.exit_code == 0, found.output
    out = elsewhere / "residua-compare"
    assert listing(out) == [MARKER, "compare.json", "compare.md", "compare.png"]
    facts = json.loads((out / "compare.json").read_text())
    rows = facts["rows"]
    assert len(rows) == 2 + 8 and rows[0]["partition"] == "dense" and rows[0]["density"] == 1.0
    noise_floor = rows.pop(1)
    assert noise_floor["partition"] == "dense again" and noise_floor["psnr"] > max(row["psnr"] for row in rows[1:])
    assert noise_floor["speedup"] is None and f"{noise_floor['psnr']:.1f} dB" in found.output
    assert {(r["partition"], r["reconstruction"], r["target"]) for r in rows[1:]} == {
        (p, r, d) for p in ("semantic", "response") for r in ("none", "probe") for d in (0.3, 0.6)
    }
    assert all(row["psnr"] and row["ssim"] and row["pflops"] and row["lpips"] is None for row in rows[1:])
    assert all(row["cost"] > row["density"] and row["max_error"] is row["quality"] is None for row in rows[1:])
    table = (out / "compare.md").read_text()
    # The table of quality, and that of physics, which has no row for the second dense run.
    assert table.count("\n| ") == 1 + 10 + 1 + 9 and "LPIPS was not measured" in table
    assert "**Physics**" in table and all({"from_dense", "lost"} <= row["physics"].keys() for row in rows)
    assert "\ndense again: dense against dense" in table
    Image.open(out / "compare.png").verify()
    assert run("compare", "--model", weights).exit_code == 2  # the folder is taken


@pytest.mark.slow
def test_compare_sweeps_error_bounds_and_qualities(weights, elsewhere):
    found = run(
        "compare", "--model", weights, "--densities", "0.4", "--partitions", "response",
        "--reconstructions", "probe,anchored", "--max-errors", "0.05,0.5", "--qualities", "faithful,fast",
        "--min-tokens", "0", "--dense-steps", "0", "--no-floor", *TINY,
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "dense again" not in found.output
    rows = json.loads((elsewhere / "residua-compare" / "compare.json").read_text())["rows"]
    asked = [(row["reconstruction"], row["quality"], row["max_error"], row["target"]) for row in rows[1:]]
    faithful, fast = QUALITIES["faithful"], QUALITIES["fast"]
    assert asked == [
        ("probe", None, None, 0.4),
        ("anchored", None, None, 0.4),
        ("anchored", None, 0.05, 0.4),
        ("anchored", None, 0.5, 0.4),
        ("anchored", "faithful", faithful.max_error, faithful.density),
        ("anchored", "fast", fast.max_error, fast.density),
    ]
    table = (elsewhere / "residua-compare" / "compare.md").read_text()
    assert f"| response | anchored | fast | {fast.max_error:g} |" in table and "cost" in table
    assert "response, anchored ≤0.05" in found.output and "faithful" in found.output
    Image.open(elsewhere / "residua-compare" / "compare.png").verify()


def test_the_table_of_compare_fits_a_terminal(weights, elsewhere):
    settings = ("--densities", "none", "--qualities", "fast", "--min-tokens", 0)
    found = run("compare", "--model", weights, *settings, *TINY, columns=80)
    assert found.exit_code == 0, found.output
    for word in ("cost", "PSNR", "GMSD", "error", "-up"):
        assert word in found.output
    assert "…" not in found.output  # nothing is cut off
    assert re.search(r"^fast .* \d+\.\d\dx$", found.output, re.MULTILINE)


def test_compare_by_default_has_three_reconstructions():
    from residua.tools.cli.compare import compare

    assert inspect.signature(compare).parameters["reconstructions"].default == "none,probe,anchored"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--max-errors", "0.1", "--reconstructions", "none,probe"), "anchored or tail"),
        (("--qualities", "best"), "wanted one of"),
        (("--densities", "none"), "nothing to compare"),
        (("--densities", "a"), "wanted numbers"),
        (("--densities", ","), "at least one"),
        (("--partitions", "psychic"), "Config.partition"),
        (("--reconstructions", "magic"), "Config.reconstruction"),
    ],
)
def test_compare_refuses(arguments, message, weights, elsewhere):
    found = run("compare", "--model", weights, *TINY, *arguments)
    assert found.exit_code == 2 and message in found.output and listing(elsewhere) == []


def test_other_work_is_told_where_it_took_time():
    assert busy(0.3, 0.0, 2) == "Other work held up 30% of the time"
    assert busy(0.05, 99.0, 1) is None  # what was measured goes over what was guessed
    assert busy(None, 1.4, 1) is None and busy(None, None, 1) is None
    assert busy(None, 1.6, 1) == "The machine was busy (load 1.6)"


def test_scenes_are_the_held_out_prompts():
    assert held_out("tuning") == (list(TUNING_PROMPTS), SEEDS["tuning"])
    assert held_out("report:3") == (list(REPORT_PROMPTS[:3]), SEEDS["report"])
    for bad in ("test", "report:0", "report:99", "report:x", ""):
        with pytest.raises(InputError, match="report:4"):
            held_out(bad)


def test_scenes_go_into_the_comparison(weights, elsewhere):
    found = run(
        "compare",
        "--model",
        weights,
        "--scenes",
        "tuning:2",
        "--methods",
        "anchored",
        "--min-tokens",
        "0",
        "--no-floor",
        *TINY,
    )
    assert found.exit_code == 0, found.output
    report = (elsewhere / "residua-compare" / "report.md").read_text()
    assert "; ".join(TUNING_PROMPTS[:2]) in report and f"seed {SEEDS['tuning']}" in report
    assert "--scenes tuning:2" in report and "Physics" in report
    both = run("compare", "--scenes", "tuning", "--prompt", PROMPT, "--out", "other", *TINY)
    assert both.exit_code == 2 and "leave one of them out" in both.output
