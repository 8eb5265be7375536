"""Where a forward pass is, what its sites are called, and what happens there."""
