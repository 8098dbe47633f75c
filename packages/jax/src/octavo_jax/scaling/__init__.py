"""State that scaling carries from step to step: delayed scaling and seeds."""
