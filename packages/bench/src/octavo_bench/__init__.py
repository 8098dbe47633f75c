"""`octavo bench`: how long the kernels take, beside what the memory allows and what torch makes of the recipe."""

__version__ = "0.2.0"
