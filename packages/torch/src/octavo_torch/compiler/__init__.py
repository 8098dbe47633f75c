"""What torch.compile, CUDA graphs and custom operators ask of the code: tracing, host reads, device-side errors."""
