"""Quantizers: values to codes and scales of both planes."""
