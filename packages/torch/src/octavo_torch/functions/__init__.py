"""Activations with their gradients, norms, and a router's product: the arithmetic of layers beside their GEMMs."""
