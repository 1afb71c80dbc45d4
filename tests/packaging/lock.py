"""Writes requirements-ci.txt: every package of `make test`, with the hash of the file that CI installs.

    .venv/bin/python tests/packaging/lock.py [--extra-index-url ...]

For Linux on x86-64 and the Python that runs this (CI: 3.11), with the versions of constraints.txt. Run it
after every change of constraints.txt or of the dependencies in pyproject.toml.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "requirements-ci.txt"
HEADER = """\
# For CI: Linux on x86-64, Python 3.11, a CPU build of torch. Made by tests/packaging/lock.py from
# constraints.txt; `make test LOCKED=1` installs these files and no others.
"""


def tools() -> list[str]:
    """What the Makefile installs without its dependencies."""
    found = re.search(r"^FLASHINFER := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


def resolved(*wanted: str, options: list[str]) -> dict[str, str]:
    """What pip would install for `wanted`: a line for each package."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--constraint", str(ROOT / "constraints.txt"), "--report", str(report)]
        subprocess.run([*command, *options, *wanted], check=True, cwd=ROOT)
        packages = json.loads(report.read_text())["install"]
    return {
        one["metadata"]["name"].lower(): f"{one['metadata']['name']}=={one['metadata']['version']} \\\n"
        f"    --hash=sha256:{one['download_info']['archive_info']['hashes']['sha256']}\n"
        for one in packages
        if "archive_info" in one["download_info"]  # all but residua itself
    }


def main() -> int:
    # setuptools builds residua, without an environment of its own
    lines = resolved(".[all]", "setuptools>=77", options=sys.argv[1:])
    lines |= resolved(*tools(), options=[*sys.argv[1:], "--no-deps"])
    TARGET.write_text(HEADER + "".join(lines[name] for name in sorted(lines)))
    print(f"{TARGET.name}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
