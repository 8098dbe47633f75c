"""Steps of optimizers, one launch each."""
