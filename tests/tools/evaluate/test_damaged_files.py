"""Files of evaluations, damaged at random: suites, prompt sets, scores, manifests and rows."""

import json
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from residua.tools.evaluate.manifest import check_manifest, read_manifest, write_manifest
from residua.tools.evaluate.prompts import read_prompts
from residua.tools.evaluate.report import suite_report
from residua.tools.evaluate.rows import make_rows
from residua.tools.evaluate.scorers import read_scores
from residua.tools.evaluate.store import DONE, SCHEMA, Store
from residua.tools.evaluate.suite import Suite, read_suite
from residua.tools.evaluate.tables import TomlTable
from tests.support.damage import damage_of, damaged_bytes, damaged_fields, json_bytes, refused, toml_bytes

ROUNDS = 200
PAST = (1000036,)  # a name of a column that is not UTF-8
SUITE: dict[str, Any] = {
    "model": "some/model",
    "name": "suite",
    "seeds": [3, 1],
    "prompts": {"texts": ["a cat", "a dog"], "limit": 2},
    "generation": {"steps": 2, "size": "64x32", "frames": 5, "guidance": 4.5, "fps": 16},
    "settings": {"a": {"density": 0.2, "config": {"probes": 4}}, "b": {"quality": "balanced"}},
    "run": {"device": "cpu", "workers": 2, "dtype": "bf16", "retries": 1},
    "metrics": {"floor": False, "scorers": ["vbench"]},
}


@pytest.fixture
def suite(tmp_path) -> Suite:
    path = tmp_path / "suite.toml"
    path.write_bytes(toml_bytes(SUITE))
    return read_suite(path)


def test_suites(tmp_path):
    path = tmp_path / "suite.toml"
    path.write_bytes(toml_bytes(SUITE))
    assert not refused(-1, lambda: read_suite(path))
    count = 0
    for seed in range(ROUNDS):
        path.write_bytes(damage_of(seed, SUITE, toml_bytes))
        count += refused(seed, lambda: read_suite(path))
    assert count > ROUNDS // 3


PROMPT_SETS = {
    "p.txt": ("file", b"# prompts\na cat\n\na dog\n"),
    "p.csv": ("file", b'prompt,name,category\n"a cat, black",c,x\na dog,d,y\n'),
    "p.jsonl": ("file", json_bytes({"prompt": "a cat", "name": "c"}) + b"\n" + json_bytes({"prompt": "d"})),
    "v/VBench_full_info.json": ("vbench", json_bytes([{"prompt_en": "a cat", "dimension": ["color", "x"]}])),
    "b/x_full_info.json": ("pbench", json_bytes([{"prompt_en": "a", "video_id": "1", "category": "c"}])),
}


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_prompt_sets(name, tmp_path):
    source, whole = PROMPT_SETS[name]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)

    def read() -> Any:
        given = path if source == "file" else path.parent
        return read_prompts(TomlTable({source: str(given)}, "prompts"), tmp_path)

    path.write_bytes(whole)
    assert not refused(-1, read)
    for seed in range(ROUNDS):
        r = random.Random(seed)
        if name.endswith(".json") and r.random() < 0.5:
            path.write_bytes(json_bytes(damaged_fields(r, {"all": json.loads(whole)}).get("all")))
        else:
            path.write_bytes(damaged_bytes(r, whole))
        refused(seed, read)


def test_scores(suite, tmp_path):
    rows = [vars(row) for row in make_rows(suite, "model")]
    first = rows[-1]
    entry = {"setting": first["setting"], "prompt": first["prompt"], "seed": first["seed"], "score": 0.5}
    results = {"color": [0.5, [{"video_path": first["video"], "video_results": 0.5}]]}
    line = f"setting,prompt,seed,score\n{entry['setting']},{entry['prompt']},{entry['seed']},0.5\n".encode()
    files = {"s.jsonl": json_bytes(entry), "s.csv": line, "s.json": json_bytes(results)}
    for name, whole in files.items():
        path = tmp_path / name
        path.write_bytes(whole)
        assert read_scores(path, rows)
        for seed in range(ROUNDS):
            r = random.Random(seed)
            values = {"s.jsonl": entry, "s.json": results}.get(name)
            fields = values is not None and r.random() < 0.5
            path.write_bytes(json_bytes(damaged_fields(r, values)) if fields else damaged_bytes(r, whole))
            refused(seed, lambda path=path: read_scores(path, rows))


def test_manifests_of_evaluations(suite, tmp_path):
    store = Store(tmp_path / "out")
    store.prepare()
    write_manifest(store.folder, check_manifest(None, suite, False, store.folder))
    path = store.folder / "manifest.json"
    whole = {**json.loads(path.read_text()), "runs": [{"id": "r", "versions": {"residua": "1"}}]}

    def read() -> Any:
        return check_manifest(read_manifest(store.folder), suite, True, store.folder)

    assert not refused(-1, read)
    count = 0
    for seed in range(ROUNDS):
        path.write_bytes(damage_of(seed, whole, json_bytes))
        count += refused(seed, read)
    assert count > ROUNDS // 3


def test_rows_of_evaluations(suite, tmp_path):
    """A row that is damaged, or of another suite, counts as missing; the report names no other file."""
    store = Store(tmp_path / "out")
    store.prepare()
    rows = make_rows(suite, "model")
    for row in rows:
        store.write_row({**vars(row), "status": DONE, "psnr": 30.0, "seconds": 2.0, "not_measured": "{}"})
    path = store.folder / "rows" / f"{rows[1].id}.parquet"
    whole, values = path.read_bytes(), store.read_row(rows[1].id)
    assert values is not None
    for seed in (*range(ROUNDS), *PAST):
        r = random.Random(seed)
        if r.random() < 0.5:
            path.write_bytes(damaged_bytes(r, whole))
        else:
            pq.write_table(pa.Table.from_pylist([other_row(r, values)], schema=SCHEMA), path)
        found = store.rows_of(rows)
        assert len(found) >= len(rows) - 1, f"seed {seed}"
        assert {row["video"] for row in found} <= {row.video for row in rows}, f"seed {seed}"
        if seed % 40 == 0:
            suite_report(suite, found, len(rows), {}, {}, {"runs": [{"versions": {}}]}, "residua evaluate")


def other_row(r: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """One or two columns with another value of their type."""
    other = dict(values)
    for name in r.sample(SCHEMA.names, r.choice((1, 2))):
        kind = SCHEMA.field(name).type
        if pa.types.is_string(kind):
            other[name] = r.choice((None, "", "x", "../../x", "[1", "{", "[]", "null", "<script>"))
        elif pa.types.is_integer(kind):
            other[name] = r.choice((None, -1, 0, 1 << 62))
        elif pa.types.is_floating(kind):
            other[name] = r.choice((None, float("nan"), float("inf"), -1e308, 0.0))
        else:
            other[name] = None
    return other
