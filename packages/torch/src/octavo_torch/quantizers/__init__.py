"""Quantizers and what is fused with them."""
