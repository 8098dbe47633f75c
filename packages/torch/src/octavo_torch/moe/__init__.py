"""Tokens to experts and back: routing, permutation, the exchange between ranks."""
