"""What a framework has to give so that one benchmark serves torch and JAX."""
