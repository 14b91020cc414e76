"""``python -m ordain``: the ``ordain`` command."""

from ordain_cli import main

if __name__ == "__main__":
    main()
