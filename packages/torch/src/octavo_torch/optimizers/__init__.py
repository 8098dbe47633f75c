"""AdamW, and what it keeps of each parameter."""
