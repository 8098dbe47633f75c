"""Saving and loading, with the recipe that the numbers were made with."""
