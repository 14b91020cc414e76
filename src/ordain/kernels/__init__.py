"""Compiled loops, each compared with a slow twin in the tests. Importing one of these modules imports numba."""
