"""JSON as files."""

from __future__ import annotations

import json

from residua.util.json_text import write_json


def test_json_is_written_whole(tmp_path):
    write_json(tmp_path / "a" / "b.json", {"x": 1})
    assert json.loads((tmp_path / "a" / "b.json").read_text()) == {"x": 1}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.json"]
