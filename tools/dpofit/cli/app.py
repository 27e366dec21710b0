"""`dpofit`: dispatches to one lazily imported module per subcommand and turns bad input into exit code 2."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from dpofit import __version__
from dpofit.errors import BadInput

# Each name is a module dpofit.cli.<name> with a function `command`; the text is its line in `dpofit --help`.
COMMANDS = {
    "list": "The recipes, with preset, hardware and documented limit.",
    "show": "One recipe: its YAML, preset, environment and history.",
    "copy": "Copy a recipe into a run folder of your own.",
    "check": "Check a LLaMA-Factory YAML for mistakes before anything runs.",
    "diff": "What differs between two recipes, overrides and DeepSpeed config included.",
    "predict": "Peak GPU, host and disk memory of a job, per phase.",
    "limits": "The longest prompt that fits, and what binds.",
    "compare": "Recipes side by side: memory, longest prompt, relative step time.",
    "advise": "The smallest changes that make a job fit, and what would not help.",
    "calibrate": "A run of your own beside its prediction; constants of its cluster for later ones.",
    "data": "Check preference data: what is dropped or cut, what sets the peak, what does harm.",
    "doctor": "What went wrong first in a training run, from its logs.",
    "verify": "Is a checkpoint whole: sizes, checksums, every tensor once, shapes against config.",
    "repair": "A Hugging Face folder from a checkpoint that has only its ZeRO files.",
    "preflight": "What would fail an hour later, found in seconds: GPUs, nodes, network, files.",
    "launch": "Run a recipe under torchrun; --smoke runs it here with a tiny model.",
    "status": "Whether a launched run goes on, how far it is, how it ended.",
    "stop": "Save, then end a launched run, on all nodes.",
}
# They make millions of small tuples and no cycle worth the name: Python's cyclic collector takes a tenth of their time,
# and memory is the same without it.
WITHOUT_COLLECTOR = {"list", "check", "predict", "limits", "compare", "advise"}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `dpofit` script. Exit codes: 0 yes, 1 the answer is no, 2 bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _collector(paused=_wanted(arguments) in WITHOUT_COLLECTOR):
            _root(arguments)(arguments, prog_name="dpofit")
    except BadInput as bad:
        for problem in bad.problems:
            print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        raise SystemExit(0) from None  # `dpofit … | head` closed the pipe, for which typer exits 1: not an error


def _root(arguments: Sequence[str]) -> typer.Typer:
    """The typer app; only the subcommand that is asked for is imported, so each answers in well under a second."""
    root = typer.Typer(
        help="Memory-tuned DPO recipes for LLaMA-Factory: what fits, before anything runs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    root.callback()(_version_option)
    wanted = _wanted(arguments)
    for name, summary in COMMANDS.items():
        if name == wanted:
            run = importlib.import_module(f"dpofit.cli.{name}").command
            root.command(name)(run)
        else:
            root.command(name, help=summary)(_not_imported)
    return root


def _wanted(arguments: Sequence[str]) -> str | None:
    return next((argument for argument in arguments if not argument.startswith("-")), None)


@contextmanager
def _collector(paused: bool) -> Iterator[None]:
    """Python's cyclic garbage collector off while a command runs that has no need of it."""
    if not paused or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _not_imported() -> None:
    """Stands in `--help` for a subcommand whose module was not asked for."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dpofit {__version__}")
        raise typer.Exit


def _version_option(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass
