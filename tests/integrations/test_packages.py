"""A framework that is missing is asked for with the command that installs it."""

from __future__ import annotations

import importlib
import sys

import pytest

from ordain.errors import MissingPackageError
from ordain.integrations.packages import require


@pytest.mark.parametrize("name", ["transformers", "accelerate", "lightning", "jax"])
def test_a_framework_that_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed: None in sys.modules makes its import fail."""
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"ordain.integrations.{name}", raising=False)
    with pytest.raises(MissingPackageError, match=rf"when importing .*pip install 'ordain\[{name}\]'"):
        importlib.import_module(f"ordain.integrations.{name}")


def test_it_is_an_import_error() -> None:
    with pytest.raises(ImportError, match=r"when importing 'no_such_package'.*pip install 'ordain\[frame\]'") as raised:
        require("sys", "no_such_package", extra="frame")
    assert isinstance(raised.value, MissingPackageError)
