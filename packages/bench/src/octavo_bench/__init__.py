"""`octavo bench`: how long kernels and layers take, compared with the memory's speed and with other libraries."""

__version__ = "0.2.0"
