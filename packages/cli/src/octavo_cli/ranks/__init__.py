"""What a MoE layer over ranks costs, on paper: a model, what it was held to, and what it advises."""
