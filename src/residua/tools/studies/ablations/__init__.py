"""The paper's ablations (section 5.2)."""
