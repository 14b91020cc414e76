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
            f"no package {package!r} that can be imported ({error})",
            expected=f"what ordain.integrations.{extra} works with",
            remedy=f"Install it: pip install 'ordain[{extra}]'",
        ) from error
