"""One generation, and dense against sparse, on a tiny pipeline."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from residua.errors import InputError, IntegrationError
from residua.hosts import Settings
from residua.tools.generate.compare import compare
from residua.tools.generate.flops import counted_passes
from residua.tools.generate.page import STAGES
from residua.tools.generate.run import Request, generate, parse_size


def silent(name):
    return lambda done, total: None


def test_steps_are_reported_and_the_pipeline_is_left_as_it_was(pipe, request_small):
    seen = []
    made = generate(pipe, request_small, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert made.frames.shape == (8, 16, 16, 3) and len(made.step_seconds) == 3
    assert 0 < sum(made.step_seconds) <= made.seconds
    assert "progress_bar" not in vars(pipe)


def test_a_request_draws_the_same_clip_whatever_the_global_generator(pipe, request_small):
    torch.manual_seed(1)
    first = generate(pipe, request_small).frames
    torch.manual_seed(2)
    np.testing.assert_array_equal(generate(pipe, request_small).frames, first)


def test_what_a_pipeline_does_not_take_is_refused(pipe):
    with pytest.raises(InputError, match=r"takes no negative_prompt.*--negative-prompt"):
        Request("x", negative_prompt="y").arguments(pipe)


@pytest.mark.parametrize("bad", [{"steps": 0}, {"frames": -1}, {"seed": -1}, {"height": 0}])
def test_impossible_requests(bad):
    with pytest.raises(InputError, match="wanted"):
        Request("x", **bad)


def test_sizes():
    assert parse_size("64") == (64, 64) and parse_size("832x480") == (480, 832)
    for bad in ("", "x", "64x", "1x2x3", "-4", "wide"):
        with pytest.raises(InputError, match="wanted"):
            parse_size(bad)


def test_other_forms_of_output(request_small):
    class Other:
        def __init__(self, **result):
            self.result = SimpleNamespace(**result)

        def __call__(self, prompt, num_inference_steps, height, width, num_frames, generator, output_type):
            for _ in self.progress_bar(range(2)):
                pass
            return self.result

    frames = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
    made = generate(Other(video=list(frames)), request_small)
    np.testing.assert_allclose(made.frames, frames / np.float32(255))
    assert len(made.step_seconds) == 2
    with pytest.raises(IntegrationError, match="neither frames nor video"):
        generate(Other(images=[]), request_small)


def test_a_comparison_measures_both(comparison):
    facts = comparison.to_dict()
    json.dumps(facts, allow_nan=False)
    assert facts["speedup"] == pytest.approx(np.median(facts["dense_runs"]) / np.median(facts["sparse_runs"]))
    assert facts["cpu_speedup"] == pytest.approx(facts["dense_cpu_seconds"] / facts["sparse_cpu_seconds"])
    assert len(facts["dense_runs"]) == len(facts["sparse_runs"]) == 2
    assert facts["tokens"] == 128 and facts["frames"] == 8 and facts["steps"] == 3
    assert facts["psnr"] > 10 and 0 < facts["ssim"] <= 1
    assert facts["lpips"] is None and facts["not_measured"]["lpips"] == "no weights here"
    assert 0.2 < facts["density"] < facts["density_with_dense"] < 1
    assert facts["sparse_calls_per_layer"] == [0, 2] and facts["dense_calls_per_layer"] == [3, 1]
    assert facts["density_per_layer"][0] is None and facts["error_per_layer"][1] > 0
    assert set(STAGES) == set(facts["stage_seconds"])
    assert facts["cost"] > facts["density"] and facts["cost_per_layer"] == [None, facts["cost"]]
    assert facts["error"] == facts["error_per_layer"][1] and facts["quality"] is None
    assert facts["chosen_per_layer"] == [{}, facts["chosen"]] and sum(facts["chosen"].values()) == 2 * 2
    assert facts["waiting"] is None or 0 <= facts["waiting"] < 1
    assert facts["versions"]["torch"] and facts["machine"]["cpu"]


def test_waiting_is_a_share_of_all_timed_seconds(comparison):
    sparse = dataclasses.replace(comparison.sparse, seconds=(4.0, 4.0), waited=(1.0, 0.0))
    dense = dataclasses.replace(comparison.dense.timed, seconds=(6.0, 6.0), waited=(1.0, 2.0))
    both = dataclasses.replace(comparison, sparse=sparse, dense=dataclasses.replace(comparison.dense, timed=dense))
    assert both.waiting == 4.0 / 20.0
    assert dataclasses.replace(both, dense=None).waiting == 1.0 / 8.0
    unknown = dataclasses.replace(sparse, waited=(1.0, None))
    assert dataclasses.replace(both, sparse=unknown).waiting is None


def test_settings_are_judged_before_anything_is_loaded():
    for bad in ({"density": 2.0}, {"max_error": 0.0}, {"reconstruction": "magic"}, {"quality": "best"}):
        with pytest.raises(InputError, match="wanted"):
            Settings(**bad)


def test_flops_are_those_of_the_architecture(comparison):
    tokens, width, layers, passes = 128, 64, 2, 3
    dense_attention = passes * layers * 4 * tokens**2 * width
    assert comparison.attention_flops(dense=True) == dense_attention
    assert comparison.attention_flops(dense=False) < dense_attention
    # Per layer: q, k, v, out of self-attention, q and out of cross-attention, the feed-forward twice.
    linear = passes * layers * 2 * tokens * (6 * width**2 + 2 * 64 * width)
    assert linear < comparison.pflops(dense=True) * 1e15 - dense_attention < 3 * linear


def test_sparse_alone_compares_with_nothing(pipe, request_small, settings):
    names = []

    def watch(name):
        names.append(name)
        return silent(name)

    found = compare(pipe, "world", request_small, settings, lpips="x", watch=watch, dense=False)
    assert names == ["sparse"]
    facts = found.to_dict()
    assert facts["speedup"] is None and facts["psnr"] is None and facts["dense_seconds"] is None
    assert "no dense video" in facts["not_measured"]["psnr"]


def test_an_exception_leaves_a_dense_pipeline(pipe, request_small, settings):
    dense = generate(pipe, request_small).frames

    def stopping(name):
        def step(done, total):
            if name == "sparse" and done == 2:
                raise KeyboardInterrupt

        return step

    with pytest.raises(KeyboardInterrupt):
        compare(pipe, "world", request_small, settings, lpips="x", watch=stopping)
    np.testing.assert_array_equal(generate(pipe, request_small).frames, dense)


def test_dense_settings_give_the_dense_clip(pipe, request_small):
    everything = Settings(dense_steps=1.0, min_tokens=0)
    found = compare(pipe, "world", request_small, everything, lpips="x", watch=silent)
    assert found.quality.psnr is None and "identical" in found.quality.not_measured["psnr"]
    assert found.density is None and found.report.total.density_with_dense == 1.0


def test_counting_passes_ends_with_the_block(pipe, request_small):
    with counted_passes(pipe, with_flops=True) as passes:
        generate(pipe, request_small)
    assert passes.count == 3 and passes.linear_flops > 0
    generate(pipe, request_small)
    assert passes.count == 3
