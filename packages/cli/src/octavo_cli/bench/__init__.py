"""`octavo bench`: how long the kernels take, beside what the memory allows and what torch makes of the recipe."""
