"""`octavo bench host`: what Python, the public API and a graph's gaps cost beside the kernels."""
