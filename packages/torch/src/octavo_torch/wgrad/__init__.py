"""Where weight gradients go: into `.grad`, into `main_grad`, now or later."""
