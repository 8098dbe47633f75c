"""Optimizers of master weights, and the states that they keep in 8 bits."""
