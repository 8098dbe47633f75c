"""Grouped layers across a mesh: roles of mesh axes, specs, and local operations with their collectives."""
