"""Measures everything that docs/results.md mentions and writes the tables to docs/results/.

    python -m dev.benchmarks.make_results                  # calls of the model in the box, then whole generations
    python -m dev.benchmarks.make_results --calls FOLDER   # also the studies of recorded calls that you have
    python -m dev.benchmarks.make_results --only ablations # one study again

Each study runs as the command that its page names, so that anybody can repeat it alone. Errors do not depend
on the machine; times do, and should be measured on a quiet one.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from residua.world.held_out import REPORT_PROMPTS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "results"
# On scenes that were not used to choose any setting.
CAPTURE = "capture --model world --heads 0,1 --prompt"
CAPTURES = {
    "world": f"{CAPTURE} '{REPORT_PROMPTS[0]}' --layers 0,2,4 --steps 1,2,4 --run-steps 6",
    "world-16k": f"{CAPTURE} '{REPORT_PROMPTS[1]}' --frames 64 --steps 2 --run-steps 4",  # every layer
    "world-32k": f"{CAPTURE} '{REPORT_PROMPTS[2]}' --frames 128 --steps 1 --run-steps 2",
}
# Study -> its command and the captures it runs on; the user's own calls are added to all.
STUDIES = {
    "diagnostics": ("analyze", ("world",)),
    "ablations": ("ablate", ("world",)),
    "reconstructions": ("reconstructions", ("world", "world-16k")),
    "gpu-rules": ("reconstructions --rules gpu", ("world-16k",)),
    "budgets": ("budgets", ("world-16k", "world-32k")),
    "baselines": ("baselines", ("world",)),
}
# Whole generations: page -> its suite in this folder.
SUITES = {
    "held-out": "held_out",
    "long": "long",
    "twenty-steps": "twenty_steps",
    "eight-steps": "eight_steps",
    "four-steps": "four_steps",
    "shared-budgets": "budgets",
}
METHODS = (
    "compare --model world --methods dense,sparge,svg2,svoo,svg-ear,hard-drop,paper,authors,anchored "
    "--densities 0.22 --steps 10 --dense-steps 0.1 --dense-layers 0 --min-tokens 0"
)


def residua(command: str, *more: str) -> None:
    words = [*shlex.split(command), *more]
    print(f"residua {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "residua", *words], check=True)


def publish(name: str, made: Path, command: str = "", shown: str = "") -> None:
    """Publishes the report as a page of the site: its text, the command replaced, and its figures by unique names."""
    text = (made / "report.md").read_text(encoding="utf-8").replace(command, shown)
    for figure in sorted(made.glob("*.png")):
        own = f"{name}-{figure.name}"
        shutil.copyfile(figure, PAGES / own)
        text = text.replace(f"({figure.name})", f"({own})")
    (PAGES / f"{name}.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=Path, help="a folder of recorded calls that you have")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "results", help="captures and reports")
    parser.add_argument("--only", action="append", choices=[*STUDIES, "methods", *SUITES], help="may be repeated")
    parser.add_argument("--scenes", type=int, default=2, help="how many of the report scenes, for the methods")
    parser.add_argument("--lpips", type=Path, help="LPIPS weights (safetensors), for the methods")
    given = parser.parse_args()
    wanted = given.only or [*STUDIES, "methods", *SUITES]
    PAGES.mkdir(parents=True, exist_ok=True)
    folders: dict[str, Path] = {}
    for name, command in CAPTURES.items():
        if any(name in STUDIES[study][1] for study in wanted if study in STUDIES):
            folders[name] = given.work / name
            residua(command, "--out", str(folders[name]))  # adds what is missing
    if given.calls is not None:
        folders["calls"] = given.calls
    for study in [name for name in STUDIES if name in wanted]:
        command, captures = STUDIES[study]
        for capture in [*captures, *(["calls"] if given.calls is not None else [])]:
            out = given.work / f"{study}-{capture}"
            residua(command, str(folders[capture]), "--out", str(out), "--force")
            publish(f"{study}-{capture}", out)
    if "methods" in wanted:
        out = given.work / "methods"
        extra = [] if given.lpips is None else ["--lpips", str(given.lpips)]
        residua(METHODS, "--scenes", f"report:{given.scenes}", "--out", str(out), "--force", *extra)
        publish("methods-world", out)
    for page in [name for name in SUITES if name in wanted]:
        out = given.work / page
        suite = f"dev/benchmarks/{SUITES[page]}.toml"
        residua(f"evaluate {suite} --out {out} --ray off")  # goes on where it stopped
        # the report names the files without their folders
        short = f"residua evaluate {SUITES[page]}.toml --out {page}"
        publish(page, out / "report", short, f"residua evaluate {suite} --out runs/{page} --ray off")


if __name__ == "__main__":
    main()
