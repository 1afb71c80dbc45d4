"""One budget for the heads of all layers, compared with the same density for each head."""
