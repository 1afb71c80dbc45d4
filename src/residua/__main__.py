"""Entry of the `residua` command. The command line needs typer and rich, the library does not."""

import signal
import sys


def main() -> None:
    try:
        _run()
    except KeyboardInterrupt:  # while the command line itself is imported
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
    finally:  # what was asked for is done or given up: an interrupt now would only spoil the exit code
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run() -> None:
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(f"residua: the command line needs {error.name}; run: pip install 'residua[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    from .tools.cli import app

    app()


if __name__ == "__main__":
    main()
