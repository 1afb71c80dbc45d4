"""Which diffusers Residua can attach to, and the inside parts of it that must be there."""

from __future__ import annotations

import inspect
import re
from typing import Any

from ..errors import IntegrationError

OLDEST, TOO_NEW = (0, 36), (0, 43)
DISPATCH = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
DISPATCH_KEYWORDS = ("attention_kwargs", "backend", "parallel_config")


def require_diffusers() -> Any:
    """The diffusers package, or an IntegrationError that says what to install."""
    try:
        import diffusers
    except ImportError as error:
        raise IntegrationError(
            "residua.accelerate needs diffusers, which is not installed; pip install 'diffusers>=0.36,<0.43'"
        ) from error
    check_version(diffusers.__version__)
    check_parts()
    return diffusers


def check_version(version: str) -> None:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) < TOO_NEW:
        raise IntegrationError(
            f"diffusers {version}: Residua attaches to 0.36 up to 0.42; pip install 'diffusers>=0.36,<0.43'"
        )


def check_parts() -> None:
    """Refuses a diffusers whose dispatcher is not the one that Residua was written against."""
    import diffusers
    from diffusers.models import attention_dispatch

    missing = [
        name
        for name in (
            "dispatch_attention_fn",
            "_templated_context_parallel_attention",
            "_AttentionBackendRegistry",
        )
        if not hasattr(attention_dispatch, name)
    ]
    if not missing:
        known = inspect.signature(attention_dispatch.dispatch_attention_fn).parameters
        missing = [
            f"dispatch_attention_fn({name})" for name in DISPATCH + DISPATCH_KEYWORDS if name not in known
        ]
    if missing:
        raise IntegrationError(
            f"diffusers {diffusers.__version__} has no {', '.join(missing)} in models/attention_dispatch; "
            "install a released version: pip install 'diffusers>=0.36,<0.43'"
        )
