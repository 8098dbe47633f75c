"""Saving and loading modules with the recipes that they were trained with, and experts in other libraries' files."""
