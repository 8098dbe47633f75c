"""`octavo why`: every backend's verdict, on this machine or for a chip that is elsewhere, and what would change it."""
