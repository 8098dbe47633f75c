"""Octavo's kernels in Triton, and what decides how they are started; no framework is imported here.

Importing this package imports neither Triton nor a framework: backends load `octavo_triton.kernels` at first use.
"""

__version__ = "0.2.0"
