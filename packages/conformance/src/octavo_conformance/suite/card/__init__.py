"""What the card says: it is plain data, and nothing works that it does not declare."""
