"""`octavo inspect`: what is in a checkpoint, and what each recipe would do to its tensors."""
