"""The ``ordain`` command: studies of data orders, built on the public API."""
