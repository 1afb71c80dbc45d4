"""Training: smoke, resumption, learning."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from residua.world import load_pipeline
from training.batches import BatchShape
from training.optim import orthogonalise
from training.train import main, run
from training.trainer import Recipe, Stage, Trainer

TINY = BatchShape(2, "frames", 32, num_frames=4, size=16)
BALLS = (0.4, 0.3, 0.3)
RECIPE = Recipe(
    stages=(Stage(2, (1.0, 0.0, 0.0), (TINY,)), Stage(2, BALLS, (TINY,))),
    num_layers=1,
    warmup=1,
    cooldown=2,
    validation_shape=TINY,
)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Trainer(RECIPE)
    run(whole, tmp_path / "whole", log_every=2, strip_every=0)
    run(Trainer(RECIPE), tmp_path / "parts", stop=2, log_every=2, strip_every=0)
    parts = Trainer(RECIPE)
    parts.load(tmp_path / "parts" / "checkpoint.pt")
    assert parts.step == 2
    run(parts, tmp_path / "parts", log_every=2, strip_every=0)
    for name in ("model", "average"):
        ours, theirs = getattr(whole, name).state_dict(), getattr(parts, name).state_dict()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]), key
    records = [{k: v for k, v in record.items() if k != "seconds"} for record in whole.history]
    assert records == [{k: v for k, v in record.items() if k != "seconds"} for record in parts.history]


def test_run_leaves_weights_history_and_plot(tmp_path: Path) -> None:
    trainer = Trainer(RECIPE)
    run(trainer, tmp_path, stop=2, log_every=1, strip_every=0)
    assert [record["step"] for record in json.loads((tmp_path / "history.json").read_text())] == [1, 2]
    assert (tmp_path / "checkpoint.pt").is_file()
    assert not list(tmp_path.glob("*.partial"))
    exported = load_pipeline(tmp_path / "weights").transformer.state_dict()
    for key, value in trainer.average.transformer.state_dict().items():
        assert torch.equal(exported[key], value.half().float()), key


def test_a_second_run_does_not_overwrite_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint.pt").touch()
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--stop", "1"])
    assert "--resume" in capsys.readouterr().err


def test_the_error_falls() -> None:
    recipe = Recipe(
        stages=(Stage(60, BALLS, (TINY,)),), num_layers=1, warmup=1, cooldown=1, validation_shape=TINY
    )
    trainer = Trainer(recipe)
    before = trainer.validate()
    for _ in range(20):
        trainer.train_step()
    after = trainer.validate()
    assert all(after[key] < 0.8 * before[key] for key in before), (before, after)


def test_stages_follow_each_other_and_the_rate_ends_at_zero() -> None:
    other = BatchShape(1, "all", num_frames=2, size=16)
    recipe = Recipe(
        stages=(Stage(60, BALLS, (TINY, other)), Stage(40, BALLS, (other,))), warmup=10, cooldown=50
    )
    assert recipe.steps == 100
    assert recipe.stage_at(59) == (recipe.stages[0], 59)
    assert recipe.stage_at(60) == (recipe.stages[1], 0)
    assert recipe.rate_at(0) < recipe.rate_at(9) == recipe.rate_at(50) == 1
    assert 0 < recipe.rate_at(99) < recipe.rate_at(60) < 1


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.3


@pytest.mark.parametrize("rank", [1, 3, 10, 30, 64])
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0, 2.0])
def test_no_spectrum_makes_an_update_run_away(rank: int, decay: float) -> None:
    generator = torch.Generator().manual_seed(rank)
    scales = torch.arange(1, rank + 1) ** -decay
    left = torch.randn(8, 64, rank, generator=generator) * scales
    matrices = left @ torch.randn(8, rank, 96, generator=generator)
    assert torch.linalg.matrix_norm(orthogonalise(matrices), 2).max() < 1.3
