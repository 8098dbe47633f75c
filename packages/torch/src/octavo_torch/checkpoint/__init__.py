"""Saving and loading modules together with the recipes that they were trained with."""
