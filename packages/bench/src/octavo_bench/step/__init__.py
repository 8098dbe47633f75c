"""`octavo bench step`: forward and backward of a grouped linear layer in every recipe."""
