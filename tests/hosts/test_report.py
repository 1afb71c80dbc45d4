"""The report of a host: headline, short and long form, rows by step and branch, page, files."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from residua import Config, InputError
from residua.hosts import HostAttention, Pass, ResolvedSettings, Site, make_report
from residua.hosts.report.data import _saving
from residua.hosts.report.table import WORST

TINY = Config(
    density=0.4, query_groups=4, kv_groups=12, probes=6, kmeans_cold=4, metric_rows=64, key_rank=8, query_rank=8
)
LAYERS = 12


def run(host, steps=3, layers=LAYERS, name="blocks.{}.attn1"):
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        for branch in ("cond", "uncond"):
            for layer in range(layers):
                q, k, v = (torch.randn(1, 2, 96, 16, generator=draw) for _ in range(3))
                host.call(
                    q,
                    k,
                    v,
                    Site(layer, Pass(step, steps, branch, grid=(2, 6, 8)), name=name.format(layer)),
                    lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(q, k, v),
                )


@pytest.fixture(scope="module")
def report():
    host = HostAttention(ResolvedSettings(TINY, dense_steps=1, min_tokens=0), name="transformer", family="Tiny")
    run(host)
    return make_report([host])


def test_the_headline_says_time_share_error_and_backend(report):
    first = report.headline
    assert re.match(r"[\d.]+ s (of attention saved \(\d+%\): .*ran|LOST: .*took) [\d.]+x", first)
    assert "24 dense calls of the same size" in first
    assert "67% of 72 calls sparse at " in first and f"{report.total.density:.1%} of the pairs" in first
    assert f"estimated error {report.total.error:.2g}, worst layer" in first
    worst = max(report.transformers[0].layers, key=lambda row: row.error)
    assert f"({worst.name})" in first
    assert re.search(r"backend (native|torch)\.$", first)
    flat = " ".join(str(report).split())
    assert flat.startswith(" ".join(first.split()))


def test_without_a_dense_call_the_saving_is_not_invented():
    host = HostAttention(ResolvedSettings(TINY, min_tokens=0))
    run(host, steps=1, layers=1)
    report = make_report([host])
    assert report.saving is None
    assert report.headline.startswith("100% of 2 calls sparse")
    assert report.headline.endswith("time saved unknown: no dense call of this size was timed.")


def test_the_saving_compares_with_calls_of_the_same_length_only():
    host = HostAttention(ResolvedSettings(TINY, min_tokens=0))
    run(host, steps=1, layers=1)
    q = torch.randn(1, 2, 7, 16)
    host.call(q, q, q, Site(1), lambda: q, why_dense="text pathway")
    assert _saving(list(host.log.tallies.values())) is None


def test_the_short_form_shows_the_worst_layers(report):
    rows = report.transformers[0].layers
    worst = sorted(rows, key=lambda row: row.error, reverse=True)[:WORST]
    text = str(report)
    shown = set(re.findall(r"blocks\.\d+\.attn1", text.split("runs")[1]))
    assert shown == {row.name for row in worst}
    assert f"and {LAYERS - WORST} layers with a smaller error" in text
    full = str(report.view(full=True))
    assert all(row.name in full for row in rows) and "smaller error" not in full
    assert max(map(len, [*text.splitlines(), *full.splitlines()])) <= 80


def test_rows_by_step_and_by_branch_add_up(report):
    [transformer] = report.transformers
    for rows in (transformer.layers, transformer.steps, transformer.branches):
        assert sum(row.sparse for row in rows) == report.total.sparse
        assert sum(row.dense_calls for row in rows) == report.total.dense_calls
        assert sum(row.pairs.get("total", 0) for row in rows) == report.total.pairs["total"]
    assert [row.name for row in transformer.steps] == ["step 0", "step 1", "step 2"]
    assert [row.name for row in transformer.branches] == ["cond", "uncond"]
    assert transformer.steps[0].dense == {"first steps": 24} and transformer.steps[1].sparse == 24
    assert "step 2" in str(report.view("step")) and "uncond" in str(report.view("branch"))


def test_an_unknown_view_is_refused(report):
    with pytest.raises(InputError, match="per='head': wanted one of 'layer', 'step', 'branch'"):
        report.view("head")


def test_nothing_sparse_comes_first_and_unmeasured_rows_are_not_printed():
    host = HostAttention(ResolvedSettings(TINY, min_tokens=4096), layers=["a", "b", "c"])
    run(host, layers=2)
    text = str(make_report([host]))
    assert text.startswith("Nothing ran sparse: 96 video tokens < min_tokens 4,096; all 12 calls were dense.")
    assert "cost:" not in text and "warning" not in text
    assert not re.search(r"^c ", text, flags=re.M)  # a layer that made no call


def test_nothing_at_all():
    text = str(make_report([HostAttention(ResolvedSettings(TINY))]))
    assert text.startswith("No attention call yet.") and "none yet" in text


def test_memory_that_is_carried_between_steps(report):
    # 12 layers, 2 branches, 2 heads; centroids and maps to coordinates in fp32, two bytes for each label
    centroids, maps, labels = (4 + 12) * 16 * 4, (8 + 8) * 16 * 4, 2 * 96 * 2
    assert report.memory == {"carried between steps": 12 * 2 * 2 * (centroids + maps + labels)}
    assert "memory carried between steps: 114.0 KiB" in str(report)


def test_warnings_stand_below_the_headline():
    host = HostAttention(ResolvedSettings(TINY.replace(density=0.05), min_tokens=0), on_error="dense")
    run(host, steps=1, layers=1)
    report = make_report([host])
    assert report.total.error > 0.2
    assert any("above 0.2" in line for line in report.warnings)
    assert "warning: the estimated error" in str(report)
    assert 'class="warning"' in report._repr_html_()


class Tags(HTMLParser):
    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.attributes += attributes
        if tag not in (*self.VOID, "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_is_escaped(tmp_path):
    host = HostAttention(ResolvedSettings(TINY, dense_steps=1, min_tokens=0), name="<b>&", family='"x"')
    run(host, layers=1, name="<script>alert({})</script>")
    path = make_report([host]).save(tmp_path / "x.html")
    page = path.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and "script" not in tags.seen and "b" not in tags.seen
    assert "&lt;script&gt;alert(0)&lt;/script&gt;" in page and "&lt;b&gt;&amp;" in page
    assert not {"src", "href"} & {name for name, _ in tags.attributes} and "url(" not in page
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page and "overflow-x: auto" in page


def test_a_notebook_shows_the_same_rows(report):
    fragment = report.view("step")._repr_html_()
    assert "<html" not in fragment and "step 2" in fragment and "<th>step</th>" in fragment


def test_the_text_is_the_same_in_a_notebook(report, monkeypatch, capsys):
    wanted = str(report)
    assert repr(report) == wanted
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(report) == wanted
    assert capsys.readouterr().out == ""


def test_saved_files(report, tmp_path):
    data = json.loads(report.save(tmp_path / "x.json").read_text())
    assert data["headline"] == report.headline and len(data["transformers"][0]["steps"]) == 3
    assert report.save(tmp_path / "x.txt").read_text().startswith(str(report)[:40])
    with pytest.raises(InputError, match=r"wanted a name that ends in \.html, \.json, \.txt"):
        report.save(tmp_path / "x.pdf")
