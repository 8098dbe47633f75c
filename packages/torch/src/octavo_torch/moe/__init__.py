"""Tokens to experts and back: routing, permutation, exchange between ranks."""
