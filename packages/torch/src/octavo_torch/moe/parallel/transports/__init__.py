"""What takes rows from rank to rank: collectives, or the ranks' own stores into one another's memory."""
