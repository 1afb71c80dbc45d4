"""The public names, and an import that stays light."""

import subprocess
import sys

import pytest

import residua


def test_the_public_names():
    names = {
        "attention",
        "Config",
        "State",
        "Receipt",
        "Route",
        "Partition",
        "SummaryKeys",
        "Pairs",
        "accelerate",
        "sdpa",
    }
    errors = {"ResiduaError", "InputError", "RouteError", "BackendError", "IntegrationError"}
    assert set(residua.__all__) == names | errors
    for name in residua.__all__:
        if name != "accelerate":  # needs diffusers
            assert getattr(residua, name) is not None
    with pytest.raises(AttributeError, match="atention"):
        residua.atention  # noqa: B018
    assert set(dir(residua)) == set(residua.__all__) | {"__version__"}


def test_errors_are_also_what_python_calls_them():
    for error in (residua.InputError, residua.RouteError):
        assert issubclass(error, residua.ResiduaError) and issubclass(error, ValueError)
    for error in (residua.BackendError, residua.IntegrationError):
        assert issubclass(error, residua.ResiduaError) and issubclass(error, RuntimeError)


def test_importing_residua_imports_nothing_optional():
    """Neither what takes seconds nor what may be missing; and it leaves the global RNG and threads alone."""
    code = (
        "import sys, torch\n"
        "state, threads = torch.get_rng_state(), torch.get_num_threads()\n"
        "import residua\n"
        "assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()\n"
        "q = torch.zeros(1, 1, 70, 8)\n"
        "residua.attention(q, q, q)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(loaded & {'diffusers', 'transformers', 'accelerate', 'typer', 'rich', 'matplotlib',"
        " 'jinja2', 'av', 'PIL', 'flashinfer'}))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == ""
