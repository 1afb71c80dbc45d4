"""Prompt sets in every form that is read."""

import json

import pytest

from residua.errors import InputError
from residua.tools.evaluate.prompts import Prompt, read_prompts
from residua.tools.evaluate.tables import TomlTable
from residua.world.held_out import REPORT_PROMPTS


def read(folder, **table):
    return list(read_prompts(TomlTable(table, "prompts"), folder))


def test_lines_of_a_text_file(tmp_path):
    (tmp_path / "p.txt").write_text("\ufeffa cat\n\n# no prompt\n a dog \na cat\n", encoding="utf-8")
    assert read(tmp_path, file="p.txt") == [Prompt("a cat"), Prompt("a dog")]
    assert read(tmp_path, file="p.txt", limit=1) == [Prompt("a cat")]


def test_csv_and_jsonl_with_images(tmp_path):
    (tmp_path / "first.png").write_bytes(b"x")
    (tmp_path / "p.csv").write_text('prompt,category,image\n"a cat, grey",animal,first.png\na dog,,\n')
    image = str((tmp_path / "first.png").resolve())
    assert read(tmp_path, file="p.csv") == [Prompt("a cat, grey", "", "animal", image), Prompt("a dog")]
    lines = [{"prompt": "a cat", "name": "c1"}, {"prompt": "a dog", "image": "first.png"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read(tmp_path, file="p.jsonl") == [Prompt("a cat", "c1"), Prompt("a dog", image=image)]


def test_files_of_other_systems_and_odd_characters(tmp_path):
    (tmp_path / "p.csv").write_bytes(b'\xef\xbb\xbfprompt, name\r\n"a ""red"" ball, big",x\r\n\r\n"two\r\nlines",y\r\n')
    found = read(tmp_path, file="p.csv")
    assert [(one.text, one.name) for one in found] == [('a "red" ball, big', "x"), ("two\nlines", "y")]
    line_separator = "a\u2028b\u0085c"  # a character of a text, not the end of a line
    (tmp_path / "p.jsonl").write_bytes(f'\ufeff{{"prompt": "{line_separator}"}}\r\n'.encode())
    assert [one.text for one in read(tmp_path, file="p.jsonl")] == [line_separator]
    (tmp_path / "p.txt").write_bytes(f"\ufeff{line_separator}\r\n# no\r\nd\r\n".encode())
    assert [one.text for one in read(tmp_path, file="p.txt")] == [line_separator, "d"]


def test_vbench_as_it_is_published(tmp_path):
    info = [{"prompt_en": "a person swimming", "dimension": ["human_action", "overall_consistency"]}]
    (tmp_path / "VBench_full_info.json").write_text(json.dumps(info))
    assert read(tmp_path, vbench=".") == [Prompt("a person swimming", "", "human_action, overall_consistency")]
    (tmp_path / "text" / "prompts").mkdir(parents=True)
    (tmp_path / "text" / "prompts" / "all_dimension.txt").write_text("a cat\na dog\n")
    assert read(tmp_path, vbench="text") == [Prompt("a cat"), Prompt("a dog")]


def test_pbench_as_it_is_published(tmp_path):
    (tmp_path / "condition_image").mkdir()
    (tmp_path / "condition_image" / "a.jpg").write_bytes(b"x")
    info = [
        {"video_id": "v1", "prompt_en": "a robot arm", "image_name": "a.jpg"},
        {"video_id": "v2", "prompt_en": "a robot arm", "image_name": "a.jpg"},
    ]
    (tmp_path / "cosmos_predict2_bench_full_info.json").write_text(json.dumps(info))
    found = read(tmp_path, pbench=".")
    assert [prompt.name for prompt in found] == ["v1", "v2"]
    assert found[0].image == str((tmp_path / "condition_image" / "a.jpg").resolve())


def test_scenes_of_the_model_in_the_box(tmp_path):
    found = read(tmp_path, scenes="report", limit=3)
    assert [prompt.text for prompt in found] == list(REPORT_PROMPTS[:3])


@pytest.mark.parametrize(
    "name, content, table, says",
    [
        ("p.csv", "text\na cat\n", {"file": "p.csv"}, "wanted a first line with a column `prompt`"),
        ("p.jsonl", '{"prompt": ""}\n', {"file": "p.jsonl"}, 'p.jsonl, line 1: wanted a text under "prompt"'),
        ("p.jsonl", "{\n", {"file": "p.jsonl"}, "p.jsonl, line 1: not valid JSON"),
        ("p.csv", "prompt,image\na,b.png\n", {"file": "p.csv"}, "b.png does not exist"),
        ("p.csv", "prompt\na ball, and a cat\n", {"file": "p.csv"}, "line 2: more columns than the first"),
        ("p.csv", 'prompt\n"a ball\na cat\n', {"file": "p.csv"}, "not valid CSV"),
        ("p.csv", "prompt,prompt\na,b\n", {"file": "p.csv"}, "a column `prompt`, once"),
        ("p.csv", "prompt,name\na,b\n\n,c\n", {"file": "p.csv"}, 'line 4: wanted a text under "prompt"'),
        ("p.txt", "a", {"file": "a\0b.txt"}, "cannot be read"),
        ("p.txt", "a", {"file": f"{'a' * 3000}.txt"}, "cannot be read"),
        ("p.txt", "a", {"file": "~nobody-has-this-name/p.txt"}, "cannot be read"),
        ("p.txt", "a", {"vbench": "a\0b"}, "no such folder"),
        ("p.jsonl", json.dumps({"prompt": "a", "image": "b\0"}), {"file": "p.jsonl"}, "does not exist"),
        ("p.csv", "prompt,category\na,x\na,y\n", {"file": "p.csv"}, "'a' is there twice"),
        ("p.doc", "", {"file": "p.doc"}, "wanted a file that ends in .txt, .csv, .jsonl"),
        ("p.txt", "", {"file": "q.txt"}, "cannot be read"),
        ("p.txt", "a", {"vbench": "nowhere"}, "wanted the folder in which you have VBench"),
        ("p.txt", "a", {"vbench": "."}, "not a folder of VBench"),
        ("p.txt", "a", {"pbench": "."}, "0 files *_full_info.json; wanted one"),
        ("p.txt", "a", {"file": "p.txt", "texts": ["b"]}, "[prompts] names file, texts: wanted one of"),
        ("p.txt", "a", {"file": "p.txt", "limits": 3}, "did you mean 'limit'?"),
        ("p.txt", "a", {"texts": [" "]}, "wanted a list of prompts"),
        ("p.txt", "a", {"scenes": "all"}, "wanted one of tuning, report"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, name, content, table, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as error:
        read(tmp_path, **table)
    assert says in str(error.value)


def test_text_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        read(tmp_path, file="p.txt")


def test_half_a_character_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "half \\ud83d of it"}\n')
    with pytest.raises(InputError, match="not valid Unicode"):
        read(tmp_path, file="p.jsonl")
