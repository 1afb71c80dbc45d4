"""Evaluates many prompts, seeds and settings on one machine or a Ray cluster, and writes the paper's tables.

`suite.py` reads what is asked for, `rows.py` splits it into rows (prompt x seed x setting), `generate.py`
makes a clip, `measure.py` compares it, `engine.py` gives rows to both, `store.py` keeps the results,
`manifest.py` says what made them, `report.py` writes the report.
"""

import importlib.util

from ...errors import InputError

PACKAGES = {"ray": "ray[data]", "pyarrow": "pyarrow"}


def require_packages() -> None:
    """Raises at the start if a package is missing that a suite needs later."""
    from ..generate import require_packages as require_videos

    missing = [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not installed: a suite needs pip install 'residua[evaluate]'")
    require_videos()
