"""The contract between Residua and a host, without any host: state, runs, reasons, warnings."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import residua
from residua import BackendError, Config, InputError, IntegrationError, State
from residua.hosts import HostAttention, Pass, ResolvedSettings, Settings, Site, around, key_padding, make_report
from residua.hosts.settings import MIN_TOKENS, Preset, min_tokens_for
from residua.hosts.watch import RunWatch
from residua.ops import BACKENDS

TOKENS = 96
TINY = Config(
    density=0.4, query_groups=4, kv_groups=12, probes=6, kmeans_cold=4, metric_rows=64, key_rank=8, query_rank=8
)


def tensors(batch=1, heads=2, tokens=TOKENS, dim=16, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, tokens, dim, generator=draw) for _ in range(3)]


def host_with(changes=None, **arguments):
    settings = {"config": TINY, "min_tokens": 0, **(changes or {})}
    return HostAttention(ResolvedSettings(**settings), **arguments)


def sdpa(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def ask(host, site, qkv=None, **more):
    q, k, v = qkv or tensors()
    return host.call(q, k, v, site, lambda: sdpa(q, k, v), **more)


def counts(host):
    total = make_report([host]).total
    return total.sparse, total.warm, total.dense


def test_every_layer_and_branch_warms_from_its_own_step_before():
    host = host_with()
    for step in range(3):
        for branch in ("cond", "uncond"):
            for layer in range(2):
                ask(host, Site(layer, Pass(step, 3, branch)))
    assert counts(host) == (12, 8, {}) and host.runs == 1
    assert set(host._states) == {(layer, branch) for layer in range(2) for branch in ("cond", "uncond")}


@pytest.mark.parametrize("config, lends", [(TINY, True), (TINY.replace(regroup_every=1), False)])
def test_a_branch_starts_from_another_branch_of_its_layer_if_the_host_allows_it(config, lends, monkeypatch):
    lent = []
    monkeypatch.setattr(State, "start_from", lambda self, other: lent.append((self, other)))
    host = host_with({"config": config}, lend=True)
    for step in range(2):
        for branch in ("cond", "uncond"):
            for layer in range(2):
                ask(host, Site(layer, Pass(step, 2, branch)))
    pairs = [(host._states[layer, "uncond"], host._states[layer, "cond"]) for layer in range(2)]
    assert lent == (pairs if lends else [])
    lent.clear()
    host = host_with({"config": config})
    for branch in ("cond", "uncond"):
        ask(host, Site(0, Pass(0, 2, branch)))
    assert lent == []


def test_a_transformer_starts_from_the_same_branch_of_its_lender(monkeypatch):
    lent = []
    monkeypatch.setattr(State, "start_from", lambda self, other: lent.append(other))
    first, second = host_with(lend=True), host_with(lend=True)
    for branch in ("cond", "uncond"):
        ask(first, Site(0, Pass(0, 2, branch)))
    lent.clear()
    second.lenders = (first,)
    ask(second, Site(0, Pass(1, 2, "uncond")))
    ask(second, Site(0, Pass(1, 2, "cond")))
    assert lent == [first._states[0, "uncond"], second._states[0, "uncond"]]
    assert counts(second) == (2, 0, {})


@pytest.mark.parametrize(
    "sites",
    [
        [Site(0, Pass(3)), Site(0, Pass(2))],  # the step goes back
        [Site(0, Pass(3, run="a")), Site(0, Pass(4, run="b"))],
    ],
)
def test_a_new_run_starts_cold(sites):
    host = host_with()
    for site in sites:
        ask(host, site)
    assert counts(host) == (2, 0, {}) and host.runs == 2


def test_the_same_step_again_is_the_same_run():
    host = host_with()
    for _ in range(2):
        ask(host, Site(0, Pass(3)))
    assert counts(host) == (2, 1, {}) and host.runs == 1


def test_reset_ends_the_run():
    host = host_with()
    ask(host, Site(0))
    assert host.warm
    host.reset()
    assert not host.warm
    ask(host, Site(0, Pass(1)))
    assert counts(host) == (2, 0, {}) and host.runs == 2


def test_branches_in_one_batch_are_what_they_are_alone():
    together, alone = host_with(), host_with()
    for step in range(3):
        q, k, v = tensors(batch=4, seed=step)
        both = ask(together, Site(0, Pass(step, branch=("cond", "uncond"))), (q, k, v))
        apart = [
            ask(alone, Site(0, Pass(step, branch=name)), [x[rows] for x in (q, k, v)])
            for name, rows in (("cond", slice(0, 2)), ("uncond", slice(2, 4)))
        ]
        assert torch.allclose(both, torch.cat(apart), atol=1e-6)
    assert counts(together) == counts(alone) == (6, 4, {})


def test_a_batch_that_cannot_be_parted_is_refused():
    with pytest.raises(InputError, match="a batch of 3 for 2 branches"):
        ask(host_with(), Site(0, Pass(branch=("a", "b"))), tensors(batch=3))


REASONS = [
    ({"dense_steps": 2}, Site(0, Pass(1, 10)), {}, "first steps"),
    ({"dense_steps": 0.2}, Site(0, Pass(1, 10)), {}, "first steps"),
    ({"dense_layers": 1}, Site(0), {}, "first layers"),
    ({"dense_layers": 1}, Site(5, depth=0), {}, "first layers"),
    ({"layers": (1, "blocks.*")}, Site(0, name="other.0"), {}, "layer not selected"),
    ({"min_tokens": 97}, Site(0), {}, "fewer than min_tokens"),
    ({"min_tokens": 90}, Site(0, text_queries=((0, 8),)), {}, "fewer than min_tokens"),
    ({}, Site(0), {"mask": torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)}, "mask is not key padding"),
    ({}, Site(0), {"mask": torch.zeros(1, TOKENS)}, "mask is not key padding"),
    ({}, Site(0), {"why_dense": "cross-attention"}, "cross-attention"),
]


@pytest.mark.parametrize(("changes", "site", "more", "reason"), REASONS)
def test_dense_calls_are_the_hosts_own_and_counted(changes, site, more, reason):
    host = host_with(changes)
    q, k, v = tensors()
    assert torch.equal(ask(host, site, (q, k, v), **more), sdpa(q, k, v))
    assert counts(host) == (0, 0, {reason: 1})


@pytest.mark.parametrize("site", [Site(1), Site(7, name="blocks.7")])
def test_selected_layers(site):
    host = host_with({"layers": (1, "blocks.*")})
    ask(host, site)
    assert counts(host)[0] == 1


def test_a_share_of_unknown_steps_or_layers_is_an_error():
    with pytest.raises(IntegrationError, match=r"dense_steps=0\.5 is a share"):
        ask(host_with({"dense_steps": 0.5}), Site(0))
    with pytest.raises(IntegrationError, match=r"dense_layers=0\.5 is a share"):
        ask(host_with({"dense_layers": 0.5}), Site(0))
    host = host_with({"dense_layers": 0.5}, layers=["a", "b"])
    for layer in range(2):
        ask(host, Site(layer))
    assert counts(host) == (1, 0, {"first layers": 1})


def test_text_is_exact_and_padding_is_masked():
    host = host_with()
    q, k, v = tensors()
    valid = torch.ones(1, TOKENS, dtype=torch.bool)
    valid[:, -3:] = False
    text = around(0, 84, TOKENS)
    out = ask(host, Site(0, text_queries=text, text_keys=text), (q, k, v), mask=valid[:, None, None])
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None])
    assert torch.allclose(out[:, :, 84:93], exact[:, :, 84:93], atol=1e-5)
    pairs = make_report([host]).total.pairs
    assert pairs["exact"] > 0 and pairs["pinned"] == 2 * 84 * 9


@pytest.mark.parametrize("ranges", [((0, 200),), ((5, 3),), ((-1, 3),)])
def test_text_beyond_the_tokens_is_refused(ranges):
    with pytest.raises(InputError, match="wanted ranges within 0 and 96"):
        ask(host_with(), Site(0, text_keys=ranges))


def test_what_no_backend_takes_stops_or_stays_dense():
    qkv = tensors()
    changes = {"config": TINY.replace(backend="no-such")}
    with pytest.raises(BackendError, match="no-such"):
        ask(host_with(changes), Site(0), qkv)
    host = host_with(changes, unsupported="dense")
    assert torch.equal(ask(host, Site(0), qkv), sdpa(*qkv))
    assert counts(host) == (0, 0, {"not supported": 1})
    assert "no-such" in make_report([host]).headline


def test_a_missing_backend_is_refused_in_the_first_dense_step():
    host = host_with({"config": TINY.replace(backend="no-such"), "dense_steps": 5})
    with pytest.raises(BackendError, match="no-such"):
        ask(host, Site(0, Pass(0, 10)))


def fail(*_, **__):
    raise ZeroDivisionError("in the middle")


def test_an_error_stops_unless_the_host_says_otherwise(monkeypatch, caplog):
    qkv = tensors()
    stops, goes_on = host_with(), host_with(on_error="dense")
    for host in (stops, goes_on):
        ask(host, Site(0), qkv)
    monkeypatch.setattr("residua.baselines.own.attention", fail)
    with pytest.raises(ZeroDivisionError):
        ask(stops, Site(0, Pass(1)), qkv)
    for step in (1, 2):
        assert torch.equal(ask(goes_on, Site(0, Pass(step)), qkv), sdpa(*qkv))
    assert not stops.warm and not goes_on.warm
    assert counts(goes_on) == (1, 0, {"error in the sparse call": 2})
    [said] = [record for record in caplog.records if "in the middle" in record.message]
    assert said.levelno == logging.WARNING


def test_an_interruption_is_never_swallowed(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("residua.baselines.own.attention", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(host_with(on_error="dense"), Site(0))


def warnings_of(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_a_run_without_a_sparse_call_is_said_once_with_its_number(caplog):
    host = host_with({"min_tokens": 4096, "dense_steps": 1})
    for step in range(3):
        ask(host, Site(0, Pass(step, 3)))
    report = make_report([host])
    make_report([host])
    message = "nothing ran sparse: 96 video tokens < min_tokens 4,096; all 3 calls were dense"
    assert warnings_of(caplog) == [f"transformer: {message}"]
    assert report.headline == f"N{message[1:]}." == str(report).replace("\n", " ")[: len(message) + 1]
    ask(host, Site(0, Pass(0, 3)))
    host.reset()
    assert len(warnings_of(caplog)) == 2  # once per run


def test_large_errors_and_many_dense_heads_are_said(caplog):
    watch = RunWatch("transformer")
    watch.read([SimpleNamespace(error=0.5, chosen={"without summary": 8, "dense": 2})])
    watch.speak()
    watch.speak()
    error, heads = warnings_of(caplog)
    assert "estimated error of attention is 0.5, above 0.2" in error
    assert "20% of the heads ran dense" in heads
    assert watch.warnings == [line.removeprefix("transformer: ") for line in (error, heads)]


def test_the_report_repeats_that_a_slow_backend_ran(monkeypatch):
    monkeypatch.setattr(type(BACKENDS["native"]), "reasons", lambda self, demand: ["it was not built"])
    for backend, told in (("auto", 1), ("torch", 0)):
        host = host_with({"config": Config(density=0.3, backend=backend)})
        for step in range(2):
            ask(host, Site(0, Pass(step, 2)))
        assert sum("it was not built" in line for line in host.warnings) == told
        assert str(make_report([host])).count("it was not built") == told


def test_what_is_logged_at_info_and_debug(caplog):
    caplog.set_level(logging.DEBUG, "residua")
    host = host_with({"dense_steps": 2})
    for step in range(3):
        ask(host, Site(0, Pass(step, 3)))
    levels = [(record.levelname, record.message) for record in caplog.records]
    assert ("INFO", "transformer: run 1 begins, 3 steps") in levels
    stays = [message for level, message in levels if level == "INFO" and "stays dense" in message]
    assert stays == ["transformer: layer 0 stays dense: first steps step 0 of 3, the first 2 stay dense"]
    assert sum(level == "DEBUG" for level, _ in levels) == 2


def test_key_padding():
    mask = torch.ones(2, 7, dtype=torch.bool)
    assert key_padding(mask, 2).shape == key_padding(mask[:1, None, None], 2).shape == (2, 7)
    assert key_padding(mask.float(), 2) is None
    assert key_padding(mask[:, None, None].expand(2, 1, 7, 7), 2) is None
    assert key_padding(mask, 3) is None


def test_settings_come_from_the_preset_unless_given():
    preset = Preset(0.3, 2, 0.1, "here")
    made = Settings(dense_steps=1, method="paper").resolve(preset)
    assert (made.config.density, made.dense_steps, made.dense_layers, made.min_tokens) == (0.3, 1, 0.1, None)
    assert min_tokens_for(torch.device("cpu")) == MIN_TOKENS
    assert HostAttention(made).settings_dict()["min_tokens"] == MIN_TOKENS


def test_the_example_of_the_documentation_runs(capsys):
    page = Path(__file__).parents[2] / "docs" / "add-a-host.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    assert len(code.splitlines()) <= 42
    names: dict[str, object] = {}
    exec(compile(code, str(page), "exec"), names)
    loop = SimpleNamespace(grid=(3, 8, 8), steps=4, step=0, branch="", run=1, sigmas=[1.0, 0.9, 0.7, 0.4, 0.0])

    def model(loop):
        for layer in range(2):
            q, k, v = tensors(tokens=200)
            assert names["self_attention"](q, k, v, layer, loop).shape == q.shape

    names["generate"](model, loop)
    text = capsys.readouterr().out
    assert "first steps 2" in text and "first layers 6" in text and "grid 3x8x8" in text


def test_warnings_are_seen_without_any_setup_of_logging():
    code = "from residua.hosts.watch import RunWatch; RunWatch('transformer').warn('x', 'said')"
    env = {**os.environ, "PYTHONPATH": str(Path(residua.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stderr == "transformer: said\n"


def padded(valid_in, total=TOKENS):
    mask = torch.zeros(len(valid_in), total, dtype=torch.bool)
    for sample, ranges in enumerate(valid_in):
        for start, stop in ranges:
            mask[sample, start:stop] = True
    return mask


@pytest.mark.parametrize(
    ("valid", "video", "kept"),
    [
        ([((0, 70),)], (0, 64), 70),  # video, text, padding
        ([((0, 70),), ((0, 80),)], (0, 64), 80),  # two prompts: what one of them uses is kept
        ([((4, 8), (20, 96))], (20, 96), 80),  # padding before, inside and after the text
    ],
)
def test_padding_is_neither_computed_nor_billed(valid, video, kept):
    mask = padded(valid)
    q, k, v = tensors(batch=len(valid))
    text = around(*video, TOKENS)
    site = Site(0, text_queries=text, text_keys=text)
    host = host_with({"config": TINY.replace(density=1.0)})
    out = ask(host, site, (q, k, v), mask=mask)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    for sample in range(len(valid)):
        assert torch.allclose(out[sample, :, mask[sample]], exact[sample, :, mask[sample]], atol=1e-5)
    assert not out[:, :, ~mask.any(0)].any()
    pairs = make_report([host]).total.pairs
    assert pairs["possible"] == 2 * kept * int(mask.sum())  # heads, rows, valid keys of all samples


def test_much_padding_costs_the_video_nothing():
    """96 video tokens and 8 of text: 400 tokens of padding change nothing."""
    q, k, v = tensors(tokens=504)
    results = []
    for tokens in (104, 504):
        host = host_with({"config": TINY.replace(density=0.5)})
        ranges = around(0, 96, tokens)
        mask = padded([((0, 104),)], tokens)
        site = Site(0, text_queries=ranges, text_keys=ranges)
        results.append(ask(host, site, [x[:, :, :tokens] for x in (q, k, v)], mask=mask))
        assert make_report([host]).total.density <= 0.6
    assert torch.equal(results[0], results[1][:, :, :104])


def test_a_mask_is_read_once_for_all_layers(monkeypatch):
    from residua.hosts import padding

    read, ranges = [], padding._ranges
    monkeypatch.setattr(padding, "_ranges", lambda valid: read.append(1) or ranges(valid))
    host, mask = host_with(), padded([((0, 90),)])
    text = around(0, 64, TOKENS)
    for layer in range(3):
        ask(host, Site(layer, text_queries=text, text_keys=text), mask=mask)
    assert len(read) == 1
    ask(host, Site(0, Pass(1), text_queries=text, text_keys=text), mask=mask.clone())
    assert len(read) == 2
