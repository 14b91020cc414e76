"""Compiled loops, and a torch program for other devices; each is compared with a slow twin in the tests.

Importing one of these modules imports numba.
"""

# z = g - m has lost too many digits where |z|^2 < CANCELLED eps (|g|^2 + |m|^2): an eighth of that in float32.
CANCELLED = 2.0**20
