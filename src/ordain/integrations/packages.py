"""Frameworks that may not be installed."""

from __future__ import annotations

from importlib import import_module

from ordain.errors import MissingPackageError


def require(*packages: str, extra: str) -> None:
    """Raise, with the pip command, unless all of the packages can be imported."""
    try:
        for package in packages:
            import_module(package)
    except ImportError as error:
        raise MissingPackageError(
            f"an error when importing {package!r} ({error})",
            expected=f"the packages that ordain.integrations.{extra} needs",
            remedy=f"Install them with: pip install 'ordain[{extra}]'",
        ) from error
