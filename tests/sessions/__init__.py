"""What the sessions of noxfile.py share, and those of packaging."""
