"""Octavo inside other libraries: `tokamax` (its ragged_dot's `implementation=`) and `qwix` (a provider).

Each module says for which version it was written; importing this package imports neither library.
"""
