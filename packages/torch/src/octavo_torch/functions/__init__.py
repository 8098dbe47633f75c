"""Activations: definitions and gradients."""
