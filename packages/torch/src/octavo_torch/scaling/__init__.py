"""State that scaling carries from step to step: delayed scaling, seeds, and the module base that holds both."""
