"""How a router chooses experts for each token, what each choice counts, and the losses that keep experts busy."""
