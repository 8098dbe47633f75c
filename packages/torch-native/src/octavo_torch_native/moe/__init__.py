"""The bound functions that route and move rows."""
