"""Quantizers, alone and fused, as functions and as pytrees."""
