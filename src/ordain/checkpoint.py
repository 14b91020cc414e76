"""Checkpoints: one file, written completely or not at all, that loads without running any code."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ordain._files import replacing
from ordain.errors import InputError, StateError

__all__ = ["load", "save"]


def save(path: str | PathLike[str], objects: Mapping[str, Any] | None = None, /, **named: Any) -> None:
    """Write ``objects`` and ``named`` to ``path``; the old file is kept until the new one is complete and readable.

    Objects with a ``state_dict()`` (model, optimizer, schedule, order, loader) are saved as that; tensors,
    numbers, strings and lists or dicts of them as they are; anything else is refused.

    >>> import tempfile, ordain
    >>> order = ordain.GraB(None, 4)
    >>> path = Path(tempfile.mkdtemp()) / "run.pt"
    >>> save(path, order=order, epoch=3)
    >>> load(path)["epoch"]
    3
    """
    given = {**(objects or {}), **named}
    if not given:
        remedy = "Write ordain.save(path, model=model, order=order)."
        raise InputError("nothing to save", expected="objects by name", remedy=remedy)
    whole = {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in given.items()}
    with replacing(Path(path)) as file:
        try:
            torch.save(whole, file)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise _refused(str(error)) from error
        file.flush()
        try:
            # Mapped, so that this reads the names and kinds of what is in it and not the numbers.
            torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise _refused(", ".join(name for name, one in whole.items() if not _loads(one)) or "all") from error


def load(path: str | PathLike[str], *, map_location: Any = None) -> dict[str, Any]:
    """Load a file written by :func:`save` as a dict; ``map_location`` as in ``torch.load``. Never runs code from it."""
    try:
        _check_whole(path)
        found = torch.load(path, map_location=map_location, weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError, MemoryError, StateError):
        raise
    except Exception as error:  # whatever torch says of a damaged file, which may be anything
        raise StateError(
            f"{path}, which cannot be read",
            expected="a whole file of tensors, numbers and strings",
            remedy="Load a complete file written by ordain.save() or torch.save(); other objects are never unpickled.",
        ) from error
    if not isinstance(found, dict):
        raise StateError(
            f"{path}, which contains a {type(found).__name__}",
            expected="a dict of the saved objects by name",
            remedy="Save with ordain.save(path, order=order, ...).",
        )
    return found


def _check_whole(path: str | PathLike[str]) -> None:
    """Refuse a file that is damaged anywhere, which torch does not notice in the numbers.

    And one that says it holds more than it is long: torch never compresses, but would unpack it.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as file:
        if sum(one.file_size for one in file.infolist()) > Path(path).stat().st_size:
            raise ValueError("it declares more data than the file contains")
        damaged = file.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} in it is damaged")


def _loads(one: Any) -> bool:
    """Can this be loaded again as it is?"""
    buffer = io.BytesIO()
    torch.save(one, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def _refused(reason: str) -> InputError:
    return InputError(
        f"an object that cannot be loaded without running code: {reason}",
        expected="objects with a state_dict(), tensors, numbers and strings",
        remedy="Save its tensors or numbers instead. The file at this path was not changed.",
    )
