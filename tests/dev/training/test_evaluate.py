"""The judgement of weights."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from dev.training.batches import BatchShape, choose_tokens, near_tokens
from dev.training.clips import draw_clips
from dev.training.errors import error_near_balls
from dev.training.evaluate import main, named_clips
from dev.training.trainer import Recipe, Stage, Trainer
from residua.world.held_out import REPORT_PROMPTS
from residua.world.model import build_model, to_tokens
from residua.world.renderer import render_video
from residua.world.scenes import default_layout


def test_weights_that_know_nothing_lose_the_ball(tmp_path: Path) -> None:
    shape = BatchShape(2, "frames", 32, num_frames=4, size=16)
    trainer = Trainer(Recipe(stages=(Stage(1, (0.0, 1.0, 0.0), (shape,)),), num_layers=1))
    trainer.export(tmp_path / "weights")
    options = ["--balls", "2", "--clips", "1", "--frames", "4", "--steps", "1"]
    main([str(tmp_path / "weights"), "--out", str(tmp_path / "look"), *options])
    record = json.loads((tmp_path / "look" / "evaluation.json").read_text())["balls-2"][0]
    assert record["balls"] == record["lost"] == 2
    assert not record["kept"]
    assert (tmp_path / "look" / "balls-2.png").is_file()


def test_scenes_of_a_set_are_those_of_the_package(tmp_path: Path) -> None:
    shape = BatchShape(2, "frames", 32, num_frames=4, size=16)
    trainer = Trainer(Recipe(stages=(Stage(1, (1.0, 0.0, 0.0), (shape,)),), num_layers=1))
    trainer.export(tmp_path / "weights")
    options = ["--scenes", "report", "--skip", "3", "--clips", "2", "--frames", "2", "--steps", "1"]
    main([str(tmp_path / "weights"), "--out", str(tmp_path / "look"), *options])
    records = json.loads((tmp_path / "look" / "evaluation.json").read_text())["report"]
    assert [record["prompt"] for record in records] == list(REPORT_PROMPTS[3:5])
    clips = named_clips(REPORT_PROMPTS[3:5])
    assert clips.layouts == [default_layout(scene) for scene in clips.scenes]


@pytest.mark.parametrize("cut", ["all", "crops", "frames"])
def test_an_error_is_that_of_the_tokens_near_the_ball(cut: str) -> None:
    model = build_model(torch.Generator().manual_seed(0), num_layers=1)  # predicts zero everywhere
    clip = draw_clips(0, 5, 1, (1.0, 0.0, 0.0))
    shape = BatchShape(1, cut, 48, 16, num_frames=4, size=16)
    error = error_near_balls(model, shape, clip, level=1.0, seed=0)
    index = choose_tokens(shape, clip, torch.Generator().manual_seed(0))[0]
    video = to_tokens(render_video(clip.scenes[0], clip.layouts[0], 4, 16, 16)[None])[0]
    near = near_tokens(shape, clip)[0]
    chosen = [i for i in index.tolist() if near[i] and i >= 16]
    assert error == pytest.approx(float(video[chosen].square().mean()), rel=1e-4)
