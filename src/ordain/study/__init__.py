"""The ``ordain`` command: herd vectors from a file, and see every order at work. A user of the public API."""
