"""Studies of captured calls: each measures, then reports; what they share stands beside them."""
