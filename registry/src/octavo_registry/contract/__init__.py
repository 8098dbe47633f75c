"""What a plugin and a front end agree on: cards, requests, hooks."""
