"""The bound functions of the three grouped GEMMs."""
