"""`octavo bench quantize`: grouped quantization against the bytes that it moves and against torch.compile."""
