"""Operands as kernels take them: the table of ragged rows, planes, what is checked at the Python edge."""
