"""The table of all pipelines in the documentation is what the installed diffusers gives."""

import re
from pathlib import Path

import diffusers
import pytest

from residua.tools.coverage import MODULAR, OTHER, coverage, rest, rest_table, table

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"


@pytest.mark.slow
@pytest.mark.skipif(not diffusers.__version__.startswith("0.42"), reason="the page is of diffusers 0.42")
def test_the_page_is_what_the_installed_diffusers_gives():
    known = {row.model: row.how for row in coverage()}
    assert known["WanTransformer3DModel"] == "supported" and known["Krea2Transformer2DModel"] == "generic"
    assert known["Lumina2Transformer2DModel"] == known["AnyFlowFARTransformer3DModel"] == "not"
    # Pipelines that need a package which is not installed everywhere may be missing from either.
    found, written = (
        {line for line in text.splitlines() if line.startswith("| `")} for text in (table(), PAGE.read_text())
    )
    assert found <= written or written <= found


@pytest.mark.slow
@pytest.mark.skipif(not diffusers.__version__.startswith("0.42"), reason="the page is of diffusers 0.42")
def test_every_pipeline_is_on_the_page():
    page = PAGE.read_text()
    names = set(re.findall(r"\w+", page))
    every = {name for name in dir(diffusers) if name.endswith("Pipeline")}
    missing = {name for name in every if name.removesuffix("Pipeline") not in names}
    assert missing <= {"DiffusionPipeline", "ModularPipeline"}  # the base classes
    assert "StableDiffusionXLPipeline" in rest()[OTHER] and "WanModularPipeline" in rest()[MODULAR]
    assert rest_table().splitlines()[2] in page  # modular ones need no other package
