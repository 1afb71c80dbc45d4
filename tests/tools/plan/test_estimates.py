"""The stored estimates: complete, and sensible between their points."""

import pytest

from residua.errors import InputError
from residua.hosts.settings import BREAK_EVEN
from residua.tools.plan import estimates as stored
from residua.tools.plan.speeds import GPUS


def rows(gpu="h100"):
    return [row for row in stored._table()["calls"] if row["gpu"] == gpu]


def test_the_table_holds_a_grid():
    for gpu in stored.stored_gpus():
        places = {(row["tokens"], row["density"]) for row in rows(gpu)}
        tokens, densities = {t for t, _ in places}, {d for _, d in places}
        assert len(places) == len(rows(gpu)) == len(tokens) * len(densities) >= 4


def test_points_of_the_table_come_back():
    for row in rows():
        found = stored.stored_estimate("h100", row["tokens"], 40, row["density"])
        wanted = row["call_ms"] + 40 * row["call_ms_per_head"]
        assert found.ms == pytest.approx(max(wanted, row["host_ms"]))
        assert found.launches == row["launches"]
        assert found.grouping_ms + found.attention_ms < wanted
        assert found.dense_ms == pytest.approx(4 * row["tokens"] ** 2 * 128 * 40 / 1e9 / GPUS["h100"].dense)


def test_more_tokens_pairs_or_heads_take_longer():
    def ms(tokens=40000, heads=24, density=0.15):
        return stored.stored_estimate("H100", tokens, heads, density).ms

    assert ms() < ms(tokens=50000) < ms(tokens=120000)
    assert ms() < ms(density=0.2)
    assert ms() < ms(heads=40)


def test_unknown_gpus():
    with pytest.raises(InputError, match="wanted one of"):
        stored.stored_estimate("voodoo2", 8192, 8, 0.2)


def test_a_call_pays_off_from_the_break_even_on():
    """From `break_even` tokens on a call takes no longer than a dense one, below it does."""
    minimum = stored.break_even("h100")
    for tokens, saves in ((minimum, True), (minimum - stored.STEP, False)):
        found = stored.stored_estimate("h100", tokens, stored.TYPICAL_HEADS, stored.TYPICAL_DENSITY)
        assert (found.ms <= found.dense_ms) == saves


def test_accelerate_knows_the_break_even_of_every_gpu():
    assert {gpu: stored.break_even(gpu) for gpu in stored.stored_gpus()} == BREAK_EVEN
