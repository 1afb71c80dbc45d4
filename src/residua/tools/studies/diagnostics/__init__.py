"""The paper's structural observations (section 3)."""
