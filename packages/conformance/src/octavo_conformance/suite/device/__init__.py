"""What a call does to its device and its compiler: capture, synchronization, compilation, cost."""
