"""Generating videos dense and sparse, comparing them, and writing down what came out."""

from __future__ import annotations

import importlib.util

from ..errors import InputError

PACKAGES = {
    "diffusers": "diffusers",
    "av": "av",
    "PIL": "pillow",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
}


def require_packages() -> None:
    """Refuses at once, and not after the videos are made, where something is missing to write them."""
    missing = [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(
            f"{', '.join(missing)} not installed: videos need pip install 'residua[diffusers,lab]'"
        )
