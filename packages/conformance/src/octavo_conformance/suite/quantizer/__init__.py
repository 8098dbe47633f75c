"""Quantizers, alone and fused with an activation or a norm."""
