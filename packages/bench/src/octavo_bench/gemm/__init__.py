"""`octavo bench gemm`: every GEMM of every recipe, beside the frameworks' own and cuBLAS's dense ones."""
