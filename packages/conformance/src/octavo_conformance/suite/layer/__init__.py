"""Whole layers: forward and backward through a framework's front end."""
