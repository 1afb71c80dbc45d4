"""The report: one file, everything escaped, nothing loaded."""

import base64
import dataclasses
import hashlib
import json
import re

import pytest

from residua.hosts import Settings
from residua.hosts.report import page as integration_page
from residua.tools.generate.page import STAGES, comparison_page, result_files
from residua.tools.reports import figure
from residua.tools.reports.page import template_text

HOSTILE = "<script>alert(1)</script> \"><img src=x onerror=alert(2)> {{ 7 * 7 }} </title> 'quoted'"


@pytest.fixture(scope="module")
def hostile_page(comparison) -> str:
    request = dataclasses.replace(comparison.request, prompt=HOSTILE)
    hostile = dataclasses.replace(comparison, request=request, model="<b>model</b>")
    return comparison_page(hostile, 12, f"residua demo --prompt {HOSTILE}").decode()


def test_a_hostile_prompt_is_text(hostile_page):
    assert "<script>alert" not in hostile_page and "<img" not in hostile_page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in hostile_page
    assert "{{ 7 * 7 }}" in hostile_page and "<b>model" not in hostile_page
    assert hostile_page.count("<script>") == 1


def test_only_the_page_s_own_script_may_run(hostile_page):
    script = re.search(r"<script>(.*?)</script>", hostile_page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in hostile_page and "default-src 'none'" in hostile_page
    assert not re.search(r"\son\w+=", hostile_page.replace("onerror", ""))


def test_the_page_needs_nothing_else(hostile_page):
    sources = re.findall(r'(?:src|href)="([^"]*)"', hostile_page)
    assert len(sources) == 4 and all(re.match(r"data:(video/mp4|image/png);base64,", x) for x in sources)
    assert "http://" not in hostile_page and "https://" not in hostile_page


def test_the_page_tells_the_figures(comparison):
    page = comparison_page(comparison, 12, "residua demo").decode()
    assert f"{comparison.quality.psnr:.1f} dB" in page and "not measured" in page
    assert "no weights here" in page and f"{comparison.density:.1%}" in page
    assert f"{comparison.cost:.1%}" in page and "quality" not in page
    [chosen] = [f"{choice} {heads}" for choice, heads in comparison.report.total.chosen.items() if heads]
    assert chosen in page
    for word in ("blocks.1.attn1", "grouping", "rest of the model", "128 video tokens", "GFLOPs"):
        assert word in page


def test_the_page_tells_the_quality_and_the_heads_that_it_made_dense(comparison):
    total = dataclasses.replace(comparison.report.total, dense_heads=7)
    named = dataclasses.replace(
        comparison, settings=Settings(quality="fast"), report=dataclasses.replace(comparison.report, total=total)
    )
    page = comparison_page(named, 12, "residua demo").decode()
    assert "quality fast" in page and "7 heads ran dense" in page


def test_every_stage_has_a_colour():
    style = template_text("comparison.css")
    assert all(f".c{place} " in style for place in range(len(STAGES) + 3))


def test_scores_of_vbench_are_shown_where_there_are_some(comparison):
    assert "residua generate --vbench" in comparison.to_dict()["not_measured"]["vbench"]
    scored = dataclasses.replace(comparison, vbench={"sparse": {"imaging_quality": 0.71}})
    assert "vbench" not in scored.to_dict()["not_measured"]
    assert "imaging_quality 0.7100" in comparison_page(scored, 12, "residua generate").decode()


def test_every_file_is_made(comparison):
    made = result_files(comparison, 12, "residua demo")
    assert set(made) == {
        "dense.mp4",
        "sparse.mp4",
        "side-by-side.webp",
        "contact-sheet.png",
        "report.html",
        "report.json",
    }
    facts = json.loads(made["report.json"])
    for key in ("speedup", "psnr", "ssim", "lpips", "density", "density_per_layer", "versions", "machine"):
        assert key in facts
    for key in ("cost", "error", "chosen", "quality"):
        assert key in facts


def test_dense_and_sparse_lie_over_each_other_and_play_by_themselves(comparison):
    page = comparison_page(comparison, 12, "residua demo").decode()
    videos = re.findall(r"<video[^>]*?(?= src=)", page)
    assert len(videos) == 3 and all("autoplay muted loop playsinline" in video for video in videos)
    assert ['class="over"' in video for video in videos] == [False, True, False]
    assert 'id="wipe" type="range"' in page and "aria-label" in page
    top = re.search(r'<span class="scale"><b>0</b><i></i><b>([\d.e+-]+)</b></span>', page)
    frames, dense = comparison.sparse.clip.frames, comparison.dense.timed.clip.frames
    assert 0 < float(top[1]) <= 255 * abs(frames - dense).max() * 1.05
    mean = re.search(r"of 255 levels, mean ([\d.e+-]+)<", page)
    assert float(mean[1]) == pytest.approx(255 * abs(frames - dense).mean(), rel=0.06)
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page and "max-width: 640px" in page


def test_one_colour_for_residua_in_every_page_and_chart():
    pages = ["\n".join(map(template_text, ("base.css", "comparison.css"))), integration_page.STYLE]
    for style in pages:
        light, dark = re.findall(r"--blue: (#\w+);", style)
        assert (light, dark) == (figure.RESIDUA, figure.RESIDUA_ON_DARK)


def test_videos_stand_still_for_people_who_asked_for_less_motion(comparison):
    """The attribute `autoplay` starts them, so the script must stop them, not only leave them alone."""
    page = comparison_page(comparison, 12, "residua demo").decode()
    assert 'toggle(!matchMedia("(prefers-reduced-motion: reduce)").matches);' in page


def test_bars_show_what_was_saved(comparison):
    page = comparison_page(comparison, 12, "residua demo").decode()
    time, work = re.findall(r"--share:([\d.]+)%", page)
    assert float(time) == pytest.approx(min(100.0, 100 / comparison.speedup), abs=0.01)
    assert float(work) == pytest.approx(100 * comparison.cost, abs=0.01)
    alone = comparison_page(dataclasses.replace(comparison, dense=None), 12, "residua demo").decode()
    assert 'class="dense"' not in alone.partition("<h2>What it took</h2>")[2].partition("</section>")[0]


def test_the_headline_names_a_speed_up_that_processor_time_confirms(comparison):
    def timed(seconds: float, cpu: float) -> str:
        sparse = dataclasses.replace(comparison.sparse, seconds=(seconds,), cpu_seconds=(cpu,))
        times = dataclasses.replace(comparison.dense.timed, seconds=(9.0,), cpu_seconds=(9.0,))
        dense = dataclasses.replace(comparison.dense, timed=times)
        return dataclasses.replace(comparison, sparse=sparse, dense=dense).headline

    assert timed(3.0, 3.0) == timed(3.0, 3.5) == "Sparse attention, 3.00 times as fast"
    assert timed(3.0, 9.0) == timed(10.0, 10.0) == "Dense and sparse, side by side"
    assert dataclasses.replace(comparison, dense=None).headline == "A video with sparse attention"


def test_without_a_dense_clip_nothing_is_compared(comparison):
    alone = dataclasses.replace(comparison, dense=None)
    made = result_files(alone, 12, "residua demo --no-dense")
    page = made["report.html"].decode()
    assert "dense.mp4" not in made and "they differ" not in page and 'id="wipe"' not in page
    assert page.count("<video") == 1
