"""The linear layers: grouped and dense, with and without a normalization."""
