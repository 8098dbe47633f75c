"""What Octavo is timed beside: the frameworks' and cuBLAS's own, in the same run on the same data."""
