"""A reader's walk: the files that one default call on a CPU passes, in order, as docs/method.md lists them.

python -m dev.walk
"""

import ast
import sys
from pathlib import Path
from types import FrameType

import residua
from residua.tools.synthetic import VideoLike, video_like

PACKAGE = Path(residua.__file__).parent


def walk() -> list[str]:
    """Files of the package in which a function is called, by their first call. Imports do not count."""
    q, k, v = video_like(VideoLike(grid=(16, 16, 16), heads=2, head_dim=64))
    attention, config, state = residua.attention, residua.Config(density=0.08), residua.State()
    attention(q, k, v, config)  # imports what a call needs
    found: dict[Path, None] = {}

    def called(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents and frame.f_code.co_name != "<module>":
            found.setdefault(path)

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        attention(q, k, v, config, state)
    finally:
        sys.setprofile(before)
    return [str(path.relative_to(PACKAGE)) for path in found]


def purpose(name: str) -> str:
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse((PACKAGE / name).read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].split(": ")[0].rstrip(".")


if __name__ == "__main__":
    for number, name in enumerate(walk(), 1):
        print(f"{number}. `{name}`: {purpose(name)}")
