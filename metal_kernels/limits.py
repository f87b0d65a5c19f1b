"""How many rows the kernels take at a time."""

# Rows of a pass through products and attention. Up to here a row's bits do not depend on the others.
MAX_VERIFY_ROWS = 16
