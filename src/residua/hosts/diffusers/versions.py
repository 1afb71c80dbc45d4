"""Which versions of diffusers Residua supports, and the internal parts of it that must exist."""

import inspect
import logging
import re
from typing import Any

from ...errors import IntegrationError

logger = logging.getLogger("residua.hosts.diffusers")
_warned: set[str] = set()  # versions

OLDEST, NEWEST = (0, 36), (0, 42)  # the versions that the tests run with
DISPATCH = "query key value attn_mask dropout_p is_causal scale enable_gqa attention_kwargs backend parallel_config"


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
    """Refuses versions that are known to be too old. A newer version than those tested only gives a warning:
    `check_parts` checks what Residua needs of it, and each processor is checked when it is attached."""
    found = re.match(r"(\d+)\.(\d+)", version)
    release = None if found is None else (int(found[1]), int(found[2]))
    if release is not None and release < OLDEST:
        raise IntegrationError(
            f"diffusers {version}: Residua attaches to 0.36 and newer; pip install 'diffusers>=0.36,<0.43'"
        )
    if (release is None or release > NEWEST) and version not in _warned:
        _warned.add(version)
        logger.warning("diffusers %s was not tested with Residua (0.36 to 0.42 were); compare with dense", version)


def check_parts() -> None:
    """Refuses a diffusers whose dispatcher differs from the one that Residua was written for."""
    import diffusers
    from diffusers.models import attention_dispatch

    missing = [
        name
        for name in ("dispatch_attention_fn", "_templated_context_parallel_attention", "_AttentionBackendRegistry")
        if not hasattr(attention_dispatch, name)
    ]
    if not missing:
        known = inspect.signature(attention_dispatch.dispatch_attention_fn).parameters
        missing = [f"dispatch_attention_fn({name})" for name in DISPATCH.split() if name not in known]
    if missing:
        raise IntegrationError(
            f"diffusers {diffusers.__version__} has no {', '.join(missing)} in models/attention_dispatch; "
            "install a released version: pip install 'diffusers>=0.36,<0.43'"
        )
