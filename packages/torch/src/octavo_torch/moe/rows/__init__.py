"""Rows that choices make of tokens: who moves them, how torch's operations move them, and what the derivatives are."""
