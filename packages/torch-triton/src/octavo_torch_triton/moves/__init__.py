"""The bound functions of "permute_rows", "combine_rows" and "dot_rows" requests."""
