"""Where a BERT's first weights come from: a folder, or a model of the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ordain.errors import InputError

__all__ = ["FILES", "Weights", "find_weights", "settled"]

FILES = ("config.json", "model.safetensors")  # a pickle is never loaded, and so never fetched
_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
_SHOWN = 12  # letters of a commit


@dataclass(frozen=True)
class Weights:
    """A folder with :data:`FILES`, and what a report calls it."""

    folder: Path
    name: str


def settled(asked: str) -> str:
    """As it is written down to be found again from anywhere: a folder by its whole path, a model by its name."""
    return str(Path(asked).resolve()) if Path(asked).is_dir() or not _HUB.fullmatch(asked) else asked


def find_weights(asked: str | Path) -> Weights:
    """The folder ``asked``, or the model ``"owner/name"`` of the hub, ``"owner/name@revision"`` at another revision.

    What was fetched before is found again without a network.

    Raises:
        InputError: there is no such folder, and the hub has no such model or cannot be reached.
    """
    folder = Path(asked)
    if folder.is_dir():
        return Weights(folder, folder.name)
    found = _HUB.fullmatch(asked) if isinstance(asked, str) else None
    if found is None:
        raise InputError(
            f"--weights {asked}, which is no folder",
            expected="a folder with config.json and model.safetensors, or owner/name of a model on the hub",
            remedy="Check the path, or leave it out for random weights.",
        )
    fetched = _fetch(found["repo"], found["revision"])
    return Weights(fetched, f"{found['repo']} at {fetched.name[:_SHOWN]} of the Hugging Face hub")


def _fetch(repo: str, revision: str | None) -> Path:
    """Into the hub's own cache, where a folder is named after its commit."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InputError(
            f"--weights {repo} without huggingface_hub",
            expected="that package, to fetch a model",
            remedy="pip install huggingface_hub, or give a folder.",
        ) from error
    try:
        # Public models only: no token of the user's is sent.
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(FILES), token=False))
    except Exception as error:  # of the hub, of HTTP or of the system: as many kinds as there are ways to fail
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(
            f"--weights {repo}: it is no folder here, and the hub did not give it ({why[:200]})",
            expected="a model that is public and a hub that can be reached, or a folder",
            remedy="Check the name and the network, or fetch config.json and model.safetensors by hand into a folder.",
        ) from error
