"""The three GEMMs in float64, and how far a backend's products may be from them."""
