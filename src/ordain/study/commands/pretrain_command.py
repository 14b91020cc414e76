"""``ordain pretrain``: weights for the tasks with a BERT."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from ordain.errors import InputError
from ordain.study.commands.terminal import plain_errors, stoppable
from ordain.study.progress import reporting


def pretrain(
    out: Annotated[Path, typer.Option(help="The folder for the weights; an interrupted command resumes.")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training text.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of 64 word pieces per step.")] = 32,
    lr: Annotated[float, typer.Option(help="Largest learning rate of AdamW.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of initial weights, order and masks.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of sequences in each set.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads.")] = 1,
    data_dir: Annotated[Path | None, typer.Option(help="The folder of all data sets.")] = None,
    verify: Annotated[bool, typer.Option(help="Check the data against their published checksums.")] = True,
) -> None:
    """Pretrain the study's BERT on WikiText-2, for ordain run sst2 --weights FOLDER."""
    from ordain.study.data import data_dir as data_folder
    from ordain.study.pretraining import Settings
    from ordain.study.pretraining import pretrain as pretrain_all
    from ordain.study.runs.team import limited_threads

    with plain_errors(), stoppable(out), limited_threads(threads), reporting("pretraining") as tell:
        if not (math.isfinite(lr) and lr > 0):
            raise InputError(f"--lr {lr}", expected="a finite rate above 0", remedy="Leave it out for 0.001.")
        settings = Settings(epochs=epochs, batch_size=batch_size, lr=lr, seed=seed, limit=limit)
        command = shlex.join(["ordain", *sys.argv[1:]])
        found = pretrain_all(out, settings, folder=data_folder(data_dir), report=tell, command=command, verify=verify)
    typer.echo(
        f"Masked word pieces of the validation text: loss {found.valid_loss:.4f}, "
        f"accuracy {100 * found.valid_accuracy:.2f} %. Weights: {out}"
    )
    typer.echo(f"Next: {shlex.join(['ordain', 'run', 'sst2', '--weights', str(out)])}")
