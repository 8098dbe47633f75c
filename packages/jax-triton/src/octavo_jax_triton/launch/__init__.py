"""One kernel as a function of traced arrays: through jax-triton on a GPU, through Triton's interpreter on a CPU."""
