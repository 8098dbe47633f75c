"""Where arrays are on a mesh, where a layer wants them, and what has to move: said once, before a program runs."""
