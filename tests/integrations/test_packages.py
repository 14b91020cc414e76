"""A framework that is missing is asked for with the command that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ordain.errors import MissingPackageError
from ordain.integrations.packages import require


@pytest.mark.parametrize("name", ["transformers", "accelerate", "lightning", "jax"])
def test_a_framework_that_is_missing(name: str) -> None:
    """As where it is not installed: None in sys.modules makes its import fail."""
    code = f"import sys; sys.modules[{name!r}] = None; import ordain.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.stderr.splitlines()[-1].startswith("ordain.errors.MissingPackageError: got no package")
    assert f"pip install 'ordain[{name}]'" in done.stderr


def test_it_is_an_import_error() -> None:
    with pytest.raises(ImportError, match=r"no package 'no_such_package'.*pip install 'ordain\[frame\]'") as raised:
        require("sys", "no_such_package", extra="frame")
    assert isinstance(raised.value, MissingPackageError)
