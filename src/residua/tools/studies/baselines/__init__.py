"""Training-free methods against each other, at the same density."""
