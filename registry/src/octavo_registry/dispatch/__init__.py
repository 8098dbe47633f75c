"""From a request to a plan: who may serve it, in which order, and what is said about it."""
