"""Where weight gradients go: into `.grad` or into `main_grad`, during backward or later."""
