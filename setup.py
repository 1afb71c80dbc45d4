"""Builds the C++ library of the native CPU backend; everything else about the package is in pyproject.toml.

The library has a plain C interface and is loaded with ctypes, so it depends on neither Python's nor torch's
headers. Each instruction set is compiled in a file of its own with its own flags; which one runs is decided
on the machine that runs it. Without a compiler the installation still succeeds: the reason is written beside
the package and `residua doctor` prints it.
"""

from __future__ import annotations

import platform
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HOME = "https://github.com/residua/residua"
RAW = "https://raw.githubusercontent.com/residua/residua"
SOURCES = Path("src/residua/ops/native/src")
COMMON = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-pthread"]
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # GCC's own AVX-512 headers
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
X86_FLAGS = {
    "kernels_avx512bf16": [*AVX512, "-mavx512bf16"],
    "kernels_avx512": AVX512,
    "kernels_avx2": ["-mavx2", "-mfma", "-mf16c"],
}


class BuildNative(build_ext):
    """Compiles the sources one by one and links them into `_native.so`, a library that is no module."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # a reinstall rebuilds

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        note = library.with_suffix(".txt")
        for stale in (library, note):
            stale.unlink(missing_ok=True)
        try:
            with ThreadPoolExecutor() as pool:
                objects = [obj for objs in pool.map(self._compile, ext.sources) for obj in objs]
            self.compiler.link_shared_object(
                objects, str(library), extra_postargs=["-pthread"], target_lang="c++", build_temp=self.build_temp
            )
        except Exception as error:  # whatever a compiler does, the rest of the package must install
            note.write_text(f"{type(error).__name__}: {error}\n")
            self.warn(f"the native backend was not built, residua will use 'torch': {error}")

    def _compile(self, source: str) -> list[str]:
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        own = X86_FLAGS.get(Path(source).stem, []) if x86 else []

        def compile_with(flags: list[str]) -> list[str]:
            return self.compiler.compile([source], self.build_temp, extra_postargs=COMMON + QUIET + flags)

        try:
            return compile_with(own)
        except CompileError:
            if not own:
                raise
            # An older compiler: without its flags the file compiles to "not available".
            return compile_with([])

    def copy_extensions_to_source(self) -> None:
        """For editable installs: copies the library, or the note that says why there is none."""
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            there, here = map(Path, self._get_inplace_equivalent(build_py, ext))
            for target, built in ((there, here), (there.with_suffix(".txt"), here.with_suffix(".txt"))):
                target.unlink(missing_ok=True)  # a running process keeps the library it has loaded
                if built.exists():
                    self.copy_file(str(built), str(target))

    def get_outputs(self) -> list[str]:
        libraries = [Path(self.get_ext_fullpath(ext.name)) for ext in self.extensions]
        return [str(path if path.exists() else path.with_suffix(".txt")) for path in libraries]


class PlatformWheel(bdist_wheel):
    """One wheel per platform for every Python 3: the library does not depend on Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def readme() -> str:
    """The README with absolute addresses, so that its images and links work outside the repository."""
    version = re.search(r'^__version__ = "(.+)"$', Path("src/residua/__init__.py").read_text(), re.MULTILINE)
    assert version, "src/residua/__init__.py has no __version__"
    tag = f"v{version[1]}"
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\g<1>{RAW}/{tag}/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{HOME}/blob/{tag}/", text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "residua.ops.native._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            language="c++",
        )
    ],
    cmdclass={"bdist_wheel": PlatformWheel, "build_ext": BuildNative},
)
