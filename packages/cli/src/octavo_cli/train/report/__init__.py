"""What training leaves behind: losses while it runs, results, figures and one HTML page."""
