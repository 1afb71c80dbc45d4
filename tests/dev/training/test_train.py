"""Training: smoke, resumption, learning."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from dev.training.batches import BatchShape
from dev.training.optim import orthogonalise
from dev.training.train import main, run
from dev.training.trainer import Recipe, Stage, Trainer
from residua.world import load_pipeline

TINY = BatchShape(2, "frames", 32, num_frames=4, size=16)
BALLS = (0.4, 0.3, 0.3)
RECIPE = Recipe(
    stages=(Stage(2, (1.0, 0.0, 0.0), (TINY,)), Stage(2, BALLS, (TINY,))),
    num_layers=1,
    rates=((0, 1.0), (2, 1.0), (4, 0.0)),
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


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoint.pt").touch()
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--stop", "1"])
    assert "--resume" in capsys.readouterr().err


def test_the_error_falls() -> None:
    recipe = Recipe(stages=(Stage(60, BALLS, (TINY,)),), num_layers=1, rates=((0, 1.0),), validation_shape=TINY)
    trainer = Trainer(recipe)
    before = trainer.validate()
    for _ in range(20):
        trainer.train_step()
    after = trainer.validate()
    assert all(after[key] < 0.8 * before[key] for key in before), (before, after)


def test_stages_follow_each_other_and_rates_are_linear_between_their_steps() -> None:
    other = BatchShape(1, "all", num_frames=2, size=16)
    recipe = Recipe(
        stages=(Stage(60, BALLS, (TINY, other)), Stage(40, BALLS, (other,))),
        rates=((0, 0.0), (10, 1.0), (50, 1.0), (100, 0.0)),
    )
    assert recipe.steps == 100
    assert recipe.stage_at(59) == (recipe.stages[0], 59)
    assert recipe.stage_at(60) == (recipe.stages[1], 0)
    assert [recipe.rate_at(step) for step in (5, 10, 50, 75)] == [0.5, 1, 1, 0.5]
    assert 0 < recipe.rate_at(99) < 0.03


def test_the_recipe_ends_at_rate_zero_and_learns_in_every_stage() -> None:
    recipe = Recipe()
    assert recipe.rate_at(recipe.steps) == 0 < recipe.rate_at(recipe.steps - 1) < 0.01
    assert [step for step, _ in recipe.rates] == sorted({step for step, _ in recipe.rates})
    first = 0
    for stage in recipe.stages:
        assert max(map(recipe.rate_at, range(first, first + stage.steps))) > 0.02
        first += stage.steps


def test_a_run_can_start_from_given_weights(tmp_path: Path) -> None:
    former = Trainer(RECIPE)
    for _ in range(2):
        former.train_step()
    former.export(tmp_path / "weights")
    trainer = Trainer(RECIPE)
    trainer.start_from(tmp_path / "weights", 2)
    assert trainer.step == 2
    for key, value in former.average.state_dict().items():
        for model in (trainer.model, trainer.average):
            assert torch.equal(model.state_dict()[key], value.half().float()), key
    trainer.train_step()
    changed = trainer.model.state_dict()
    assert any(not torch.equal(changed[key], value) for key, value in former.average.state_dict().items())


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
