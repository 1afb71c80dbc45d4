"""Generates videos dense and sparse, compares them and writes the results."""

import importlib.util

from ...errors import InputError

PACKAGES = {"diffusers": "diffusers", "av": "av", "PIL": "pillow", "jinja2": "jinja2", "matplotlib": "matplotlib"}


def require_packages() -> None:
    """Raises before any video is generated if a package is missing that is needed to write it."""
    missing = [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not installed: videos need pip install 'residua[diffusers,lab]'")
