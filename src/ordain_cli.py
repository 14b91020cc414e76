"""The ``ordain`` command: help and version at once; everything else once torch is imported.

A module of its own, because importing anything from ``ordain`` imports torch, which takes seconds.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

ABOUT = "Find better orders of training data than random reshuffling."
COMMANDS = {  # the first lines of their own help
    "herd": "Find an order of vectors whose prefix sums stay small (the herding problem).",
    "demo": "Train on scikit-learn's digits in a few orders, and write a page with the results.",
    "advise": "Advise whether to order the data of a task, from three short epochs with and without ordering.",
    "report": "Write a report on a run; for a folder of runs, one report each and an overview page.",
    "claims": "Check the paper's claims against a folder of runs, and write README.md and index.html there.",
    "pack": "Replace the records of each run by one compressed file. Resuming the run unpacks it again.",
    "pretrain": "Pretrain the study's BERT on WikiText-2, for ordain run sst2 --weights FOLDER.",
    "run": "Train a task with several orders. The same command resumes an interrupted run.",
    "simulate-ranks": "Simulate ranks that order one data set together: how good their order is, and what they send.",
    "tasks": "List the tasks that ordain run trains.",
    "data": "List the data sets of the study and download them.",
}
_HELP = f"""\
Usage: ordain [OPTIONS] COMMAND [ARGS]...

  {ABOUT}

Options:
  --version             Show the version and exit.
  --install-completion  Install completion for the current shell.
  --show-completion     Show completion for the current shell.
  -h, --help            Show this message and exit.

Commands:
{{commands}}

To begin: ordain demo. Options of a command: ordain COMMAND --help
The commands need: pip install 'ordain[study]'
"""


def main() -> None:
    """Run the command line, or say how to install it."""
    words = sys.argv[1:]
    if words == ["--version"]:
        sys.stdout.write(f"ordain {version('ordain')}\n")
    elif words in ([], ["--help"], ["-h"]):
        wide = max(map(len, COMMANDS))
        sys.stdout.write(
            _HELP.format(commands="\n".join(f"  {name:{wide}}  {said}" for name, said in COMMANDS.items()))
        )
    else:
        _run()


def _run() -> None:
    try:
        from ordain.study.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ordain"):
            raise
        sys.exit(f"ordain: the command needs {error.name!r}. Install it with: pip install 'ordain[study]'")
    app(prog_name="ordain")
