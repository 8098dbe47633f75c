"""FP8 products on Hopper, in Gluon: who fetches, who multiplies and who promotes is written down, not inferred."""
