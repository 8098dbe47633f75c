"""Linear layers of one matrix for all rows."""
