"""`octavo bench moe`: a MoE layer in torch from router to combined rows."""
