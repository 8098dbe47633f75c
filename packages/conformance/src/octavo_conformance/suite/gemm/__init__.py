"""Grouped GEMMs, and rows that move between tokens and groups."""
