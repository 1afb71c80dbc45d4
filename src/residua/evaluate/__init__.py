"""Many prompts, seeds and settings, on one machine or on a Ray cluster, and the paper's tables at the end.

`suite.py` reads what is asked for, `rows.py` cuts it into rows (prompt x seed x setting), `generate.py`
makes a clip, `measure.py` compares it, `engine.py` hands rows to both, `store.py` keeps what is done,
`report.py` tells it.
"""

from __future__ import annotations

import importlib.util

from ..errors import InputError

PACKAGES = {"ray": "ray[data]", "pyarrow": "pyarrow"}


def require_packages() -> None:
    """Refuses at once where something is missing that a suite needs later."""
    from ..generation import require_packages as require_videos

    missing = [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not installed: a suite needs pip install 'residua[evaluate]'")
    require_videos()
