"""What a result must be: bits of the definition, error bounds, and the float64 functions behind both."""
