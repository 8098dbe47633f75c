"""Experts that are spread over the ranks of a process group: what travels between them, and by which route."""
