"""Layouts of quantized models' files, and the way between them and the planes of weights."""
