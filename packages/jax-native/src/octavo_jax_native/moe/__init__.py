"""Routers, and rows that move with their choices."""
