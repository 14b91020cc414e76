"""``ordain`` and ``python -m ordain``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say how to install it."""
    try:
        from ordain.study.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ordain"):
            raise
        sys.exit(f"ordain: the command needs {error.name!r}. Install it with: pip install 'ordain[study]'")
    app()


if __name__ == "__main__":
    main()
