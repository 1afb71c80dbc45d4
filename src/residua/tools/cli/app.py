"""The application object with which every command registers, and what all commands share."""

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperGroup

from ...errors import InputError, ResiduaError

TRACEBACK = "RESIDUA_TRACEBACK"  # set to anything: an unexpected error prints its traceback
MIN_COLUMNS = 72
# How help names the type of an option; a flag takes no value.
METAVARS = {bool: "", int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}
# Other packages log what only concerns their developers; users who want it set these variables.
QUIET = {"DIFFUSERS_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error"}

# The order of `residua --help`: what a newcomer needs first. Commands that are not named here come last.
ORDER = ("doctor", "demo", "generate", "compare", "tune", "evaluate", "plan", "bench", "capture")

Command = TypeVar("Command", bound=Callable[..., Any])


class _PlainHelp:
    """Shows no type beside `--help`, which is a flag."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option


class PlainCommand(_PlainHelp, TyperCommand):
    """A command. Its arguments are shown by name, without `<str>` beside it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.params:
            if isinstance(param, TyperArgument):
                setattr(param, "display_type_rich", lambda ctx: "")  # noqa: B010


class PlainGroup(_PlainHelp, TyperGroup):
    """A group of commands, in the order that help shows."""

    def list_commands(self, ctx: Any) -> list[str]:
        place = {name: number for number, name in enumerate(ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: place.get(name, len(ORDER)))

    def make_context(self, *given: Any, **more: Any) -> Any:
        with readable_interrupts():
            return super().make_context(*given, **more)

    def invoke(self, ctx: Any) -> Any:
        with readable_interrupts():
            return super().invoke(ctx)


app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Training-free sparse attention for video diffusion transformers (SparsePR).",
)
console = Console()
complaints = Console(stderr=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        from ... import __version__

        typer.echo(f"residua {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", module=r"residua(\.|$)")


def command(group: typer.Typer = app, **options: Any) -> Callable[[Command], Command]:
    """Registers a command, with readable errors. A parameter whose type is a dataclass stands for its fields:
    the options that several commands share."""

    def register(function: Command) -> Command:
        parameters: dict[str, inspect.Parameter] = {}
        shared: dict[str, Any] = {}
        for name, given in inspect.signature(function, eval_str=True).parameters.items():
            if is_dataclass(given.annotation):
                shared[name] = given.annotation
                parameters.update(_fields(given.annotation))
            else:
                parameters[name] = given.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in parameters.items():
            _name_type(name, parameter.annotation)

        def run(**values: Any) -> None:
            for name, kind in shared.items():
                values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            with readable_errors():
                function(**values)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        # typer reads both, and could not evaluate text annotations
        run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        group.command(cls=PlainCommand, **options)(run)
        return function

    return register


def _fields(kind: Any) -> dict[str, inspect.Parameter]:
    """The fields of a dataclass as parameters."""
    hints = inspect.get_annotations(kind, eval_str=True)
    found = inspect.signature(kind).parameters
    return {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=found[name].default, annotation=hint)
        for name, hint in hints.items()
    }


def _name_type(name: str, hint: Any) -> None:
    """Help shows types as words: INTEGER, not <int range>."""
    for option in getattr(hint, "__metadata__", ()):
        if isinstance(option, typer.models.ArgumentInfo) and option.metavar is None:
            option.metavar = name.upper()
        if isinstance(option, typer.models.OptionInfo) and option.metavar is None:
            found = (METAVARS[kind] for kind in _kinds(get_args(hint)[0]) if kind in METAVARS)
            option.metavar = next(found, None)


def _kinds(hint: Any) -> Iterator[Any]:
    """A type and all types inside it: `list[str] | None` contains `str`."""
    yield hint
    for inner in get_args(hint):
        yield from _kinds(inner)


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turns an error into one line and an exit code: 2 for what the user can fix, 1 for the rest."""
    try:
        with readable_interrupts():
            yield
    except ResiduaError as error:
        _complain(str(error))
        raise typer.Exit(2) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        line, status = _one_line(error)
        _complain(line)
        raise typer.Exit(status) from None


@contextmanager
def readable_interrupts() -> Iterator[None]:
    """Turns Ctrl-C into one line and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        complaints.print("[yellow]stopped[/yellow]")
        raise typer.Exit(130) from None


def _one_line(error: Exception) -> tuple[str, int]:
    """The message for an error that Residua did not raise, and the exit code."""
    first = (str(error).strip().splitlines() or ["no message"])[0][:400]
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}", 2
    if type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({first}): a smaller --size, fewer --frames, or --offload model", 2
    return f"{type(error).__name__}: {first} ({TRACEBACK}=1 shows where it came from)", 1


def _complain(text: str) -> None:
    complaints.print(f"[red]error:[/red] {escape(visible(text))}", soft_wrap=True)


def visible(text: str) -> str:
    """The text with control characters written out: names in a file must not steer the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


def writable(path: Path, force: bool) -> Path:
    """Refuses to overwrite a file without `force`, to write through a link, and a place where nothing can be
    written: before work is done whose result would be lost."""
    if path.is_symlink():
        raise InputError(f"{path} is a link: give the file itself")
    if path.exists() and not force:
        raise InputError(f"{path} exists: choose another name, or add --force to replace it")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"{path}: {above} is not a folder that can be written to")
    return path


def show(table: RenderableType) -> None:
    """Prints a table at least 72 columns wide: in fewer, numbers would be cut. A narrower terminal wraps the
    lines instead."""
    wide = console.width >= MIN_COLUMNS
    printer = console if wide else Console(file=console.file, width=MIN_COLUMNS)
    printer.print(table)
