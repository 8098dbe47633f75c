"""What the sessions of noxfile.py share, and the sessions that have a module of their own."""
