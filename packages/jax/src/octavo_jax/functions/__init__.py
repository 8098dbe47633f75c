"""Activations and normalizations as differentiable functions, and their composition with a quantizer."""
