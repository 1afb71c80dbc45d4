"""The judgement of weights."""

import json
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from training.batches import BatchShape
from training.evaluate import main
from training.trainer import Recipe, Stage, Trainer


def test_weights_that_know_nothing_lose_the_ball(tmp_path: Path) -> None:
    shape = BatchShape(2, "frames", 32, num_frames=4, size=16)
    trainer = Trainer(Recipe(stages=(Stage(1, (0.0, 1.0, 0.0), (shape,)),), num_layers=1))
    trainer.export(tmp_path / "weights")
    options = ["--balls", "2", "--clips", "1", "--frames", "4", "--steps", "1"]
    main([str(tmp_path / "weights"), "--out", str(tmp_path / "look"), *options])
    record = json.loads((tmp_path / "look" / "evaluation.json").read_text())["2"][0]
    assert record["balls"] == record["lost"] == 2
    assert not record["kept"]
    assert (tmp_path / "look" / "balls-2.png").is_file()
