"""One budget for the heads of all layers, against the same density for each."""
