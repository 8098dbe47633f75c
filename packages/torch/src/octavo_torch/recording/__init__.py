"""Passes that are written down once and run again on other arrays, for those whose Python takes longer than a GPU."""
