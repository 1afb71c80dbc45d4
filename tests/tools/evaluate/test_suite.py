"""Reading suites: what is given is what is run, and what is wrong is said with the way out."""

from pathlib import Path

import pytest

from residua.errors import InputError
from residua.tools.evaluate.rows import hash_model, make_rows
from residua.tools.evaluate.suite import DENSE, NOISE_FLOOR, read_suite

GOOD = """
name = "first"
model = "world"
seeds = [3, 1]
[prompts]
texts = ["a cat", "a dog"]
[generation]
steps = 4
size = "832x480"
frames = 9
guidance = 5
[settings.paper]
method = "paper"
density = 0.22
dense_steps = 0.1
[settings.balanced]
quality = "balanced"
[settings.own]
config = { density = 0.1, probes = 32 }
[run]
workers = 3
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "suite.toml"
    path.write_text(text)
    return path


def test_a_suite_is_read_as_it_stands(tmp_path):
    suite = read_suite(write(tmp_path, GOOD))
    assert suite.name == "first" and suite.model == "world" and suite.seeds == (3, 1)
    assert [prompt.text for prompt in suite.prompts] == ["a cat", "a dog"]
    assert (suite.generation.height, suite.generation.width) == (480, 832)
    assert [setting.name for setting in suite.settings] == [DENSE, NOISE_FLOOR, "paper", "balanced", "own"]
    paper = suite.setting("paper").asked
    assert paper.method == "paper" and paper.density == 0.22 and paper.dense_steps == 0.1
    assert suite.setting("own").asked.config.probes == 32
    assert suite.work.workers == 3 and suite.setting(NOISE_FLOOR).asked is None


def test_the_floor_can_be_left_out_and_the_name_is_the_file_s(tmp_path):
    text = GOOD.replace('name = "first"\n', "") + "[metrics]\nfloor = false\n"
    suite = read_suite(write(tmp_path, text))
    assert NOISE_FLOOR not in [setting.name for setting in suite.settings] and suite.name == "suite"


@pytest.mark.parametrize(
    "old, new, says",
    [
        ('model = "world"', "", "model is missing: write, for example, model ="),
        ("seeds = [3, 1]", "seds = [3, 1]", "seds is not known; did you mean 'seeds'?"),
        ("seeds = [3, 1]", "seeds = [3, 3]", "seeds = [3, 3]: wanted different whole numbers"),
        ("seeds = [3, 1]", "seeds = [-1]", "wanted different whole numbers"),
        ("steps = 4", "step = 4", "[generation] step is not known; did you mean 'steps'?"),
        ("steps = 4", 'steps = "4"', "[generation] steps = '4': wanted a whole number"),
        ("steps = 4", "steps = true", "[generation] steps = True: wanted a whole number"),
        ("steps = 4", "steps = 0", "steps=0: wanted at least 1"),
        ('size = "832x480"', 'size = "wide"', "wanted one number, or width x height"),
        ('method = "paper"', 'method = "papre"', "did you mean 'paper'?"),
        ('quality = "balanced"', 'quality = "ballanced"', "did you mean 'balanced'?"),
        ('quality = "balanced"', 'quality = "fast"\ndensity = 0.1', "quality='fast' together with density="),
        ("density = 0.22", "density = 22", "[settings.paper] Config.density=22: wanted a number above 0"),
        ("probes = 32", "probs = 32", "[settings.own] unknown setting probs"),
        ("[settings.paper]", '[settings."../up"]', "it names a folder"),
        ("[settings.paper]", "[settings.dense]", "[settings.dense] takes no options"),
        ("workers = 3", "workers = 0", "[run] workers = 0: wanted at least 1"),
        ("workers = 3", "threads = 1000000000", "[run] threads = 1000000000: wanted at most"),
        ("dense_steps = 0.1", "dense_steps = nan", "[settings.paper] dense_steps=nan: wanted a whole number"),
        ("density = 0.22", "dense_layers = -1", "[settings.paper] dense_layers=-1: wanted a whole number"),
        ("dense_steps = 0.1", "dense_steps = 1e308", "[settings.paper] dense_steps=1e+308: wanted"),
        ("density = 0.22", "min_tokens = -1", "[settings.paper] min_tokens=-1: wanted a whole number"),
        ('model = "world"', 'model = "./gone"', "gone is no folder with model_index.json"),
        ('model = "world"', 'model = "gone"', "gone is no folder with model_index.json"),
        ('model = "world"', r'model = "./a\u0000b"', "is no folder with model_index.json"),
        ("workers = 3", 'dtype = "fp8"', "[run] dtype = 'fp8': wanted one of auto, fp32"),
        ("[run]", '[metrics]\nscorers = ["vbenhc"]\n[run]', "did you mean 'vbench'?"),
        ("[run]", '[metrics]\nlpips = "none.safetensors"\n[run]', "does not exist"),
        ('texts = ["a cat", "a dog"]', "", "[prompts] names nothing: wanted one of file, texts"),
        ('texts = ["a cat", "a dog"]', "texts = []", "no prompt was found"),
        ("seeds = [3, 1]", "seeds = [3, 1", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_said_with_the_way_out(tmp_path, old, new, says):
    assert old in GOOD
    with pytest.raises(InputError) as error:
        read_suite(write(tmp_path, GOOD.replace(old, new)))
    assert says in str(error.value) and "suite.toml" in str(error.value)


def test_a_suite_without_a_sparse_setting_is_refused(tmp_path):
    text = 'model = "world"\n[prompts]\ntexts = ["a cat"]\n'
    with pytest.raises(InputError, match="no setting other than dense"):
        read_suite(write(tmp_path, text))


@pytest.mark.parametrize(
    "line, says",
    [
        ("guidance = nan", "[generation] guidance = nan: wanted a finite number"),
        ("guidance = inf", "[generation] guidance = inf: wanted a finite number"),
        ("fps = 1000000", "[generation] fps = 1000000: wanted 1 to 1000"),
        ("steps = 1e308", "[generation] steps = 1e+308: wanted a whole number"),
        ("frames = -8", "frames=-8: wanted at least 1"),
        ("steps = 99999999999999999999", "at most 64 are allowed"),
    ],
)
def test_absurd_numbers_are_refused_before_a_model_is_loaded(tmp_path, line, says):
    text = 'model = "world"\n[prompts]\ntexts = ["a cat"]\n[settings.fast]\nquality = "fast"\n[generation]\n'
    with pytest.raises(InputError) as error:
        read_suite(write(tmp_path, text + line))
    assert says in str(error.value)


def test_a_folder_with_a_model_is_found_beside_the_suite(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model_index.json").write_text("{}")
    for name in ("weights", "./weights", str(tmp_path / "weights")):
        suite = read_suite(write(tmp_path, GOOD.replace('"world"', f'"{name}"')))
        assert suite.model == str((tmp_path / "weights").resolve())


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_suite(tmp_path / "none.toml")


def test_the_example_suite_can_be_read_and_has_held_out_prompts():
    from residua.world.held_out import REPORT_PROMPTS

    path = Path(__file__).parents[3] / "examples" / "suite.toml"
    suite = read_suite(path)
    assert {prompt.text for prompt in suite.prompts} <= set(REPORT_PROMPTS) and len(suite.prompts) >= 16
    assert len(make_rows(suite, hash_model(suite.model))) == len(suite.prompts) * len(suite.settings)
