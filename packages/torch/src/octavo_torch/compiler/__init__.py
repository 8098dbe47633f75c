"""Everything about torch.compile, CUDA graphs, custom operators and torch.func; errors that devices have noticed."""
