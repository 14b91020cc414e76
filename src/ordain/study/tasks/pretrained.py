"""Where pretrained BERT weights come from: a folder, or a model of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from ordain.errors import InputError

__all__ = ["FILES", "find_weights", "settled"]

FILES = ("config.json", "model.safetensors")  # pickled weights are never loaded, and so never downloaded
_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
_SHOWN = 12  # letters of a commit


def settled(asked: str) -> str:
    """``asked`` independently of the current folder: a folder by its full path, a model by its name."""
    return str(Path(asked).resolve()) if Path(asked).is_dir() or not _HUB.fullmatch(asked) else asked


def find_weights(asked: str | Path) -> tuple[Path, str]:
    """A folder with :data:`FILES`, and its name in reports.

    ``asked`` is the folder itself, or ``"owner/name"`` or ``"owner/name@revision"`` of a model on the hub. A model that
    was downloaded before is found without a network.

    Raises:
        InputError: there is no such folder, and the hub has no such model or cannot be reached; or a file is missing.
    """
    folder, name = Path(asked), Path(asked).name
    if not folder.is_dir():
        found = _HUB.fullmatch(asked) if isinstance(asked, str) else None
        if found is None:
            raise InputError(
                f"--weights {asked}, which is no folder",
                expected="a folder with config.json and model.safetensors, or owner/name of a model on the hub",
                remedy="Check the path, or leave it out for random weights.",
            )
        folder = _download(found["repo"], found["revision"])
        name = f"{found['repo']} at {folder.name[:_SHOWN]} of the Hugging Face hub"
    for file in FILES:
        if not (folder / file).is_file():
            raise InputError(
                f"{folder} without {file}",
                expected="config.json and model.safetensors of a BERT",
                remedy="Save the model with save_pretrained(); pickled weights are never loaded.",
            )
    return folder, name


def _download(repo: str, revision: str | None) -> Path:
    """Download to the cache of the hub, where a folder is named after its commit."""
    from huggingface_hub import snapshot_download  # transformers, which builds the model, depends on it

    try:
        # Only public models: no token of the user is sent.
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(FILES), token=False))
    except Exception as error:  # of the hub, of HTTP or of the system
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(
            f"--weights {repo}: it is no folder here, and the hub did not give it ({why[:200]})",
            expected="a model that is public and a hub that can be reached, or a folder",
            remedy="Check the name and the network, or fetch config.json and model.safetensors by hand into a folder.",
        ) from error
