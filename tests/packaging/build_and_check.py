"""Builds the sdist, a wheel from it, and makes a call with that wheel in a fresh environment (`make dist`).

Options after the file name are given to pip, such as `--extra-index-url ADDRESS` for a CPU build of torch.
"""

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def fresh_environment(folder: Path) -> Path:
    """A new virtual environment's Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def only(pattern: str, folder: Path) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, f"{folder}: wanted one {pattern}, found {[path.name for path in found]}"
    return found[0]


def check_contents(sdist: Path, wheel: Path) -> None:
    """The sdist has the C++ sources; the wheel has the library instead, every other file of the package, and nothing
    that is not the package."""
    with tarfile.open(sdist) as archive:
        held = archive.getnames()
    assert any(name.endswith("abi.cpp") for name in held), "sdist without C++ sources"
    unwanted = [name for name in held if "/tests/" in name or "/dev/" in name]
    assert not unwanted, f"sdist with {unwanted}"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "-py3-none-" in wheel.name, wheel.name
    assert any(name.endswith("_native.so") for name in names), "wheel without the native library"
    package = ROOT / "src" / "residua"
    data = [path for path in package.rglob("*") if path.is_file() and path.suffix not in (".cpp", ".h", ".so", ".pyc")]
    missing = {path.relative_to(package.parent).as_posix() for path in data} - set(names)
    assert not missing, f"wheel without {sorted(missing)}"
    unwanted = [name for name in names if name.endswith((".cpp", ".h")) or not name.startswith("residua")]
    assert not unwanted, f"wheel with {unwanted}"
    assert "](docs/" not in metadata, "the long description has addresses that lead nowhere outside the repository"


def main(pip_options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        builder = fresh_environment(tmp / "builder")
        run(builder, "-m", "pip", "install", "--quiet", "build")
        run(builder, "-m", "build", "--sdist", "--outdir", tmp / "dist", ROOT)
        sdist = only("*.tar.gz", tmp / "dist")
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp / "unpacked", filter="data")
        source = only("residua-*", tmp / "unpacked")
        run(builder, "-m", "build", "--wheel", "--outdir", tmp / "dist", source)
        wheel = only("*.whl", tmp / "dist")
        check_contents(sdist, wheel)

        user = fresh_environment(tmp / "user")
        constraints = ROOT / "constraints.txt"
        run(user, "-m", "pip", "install", "--quiet", *pip_options, "--constraint", constraints, wheel)
        run(user, ROOT / "tests" / "packaging" / "check_installed.py", cwd=tmp)

        DIST.mkdir(exist_ok=True)
        for file in (sdist, wheel):
            (DIST / file.name).write_bytes(file.read_bytes())
            print(f"dist/{file.name}  {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
