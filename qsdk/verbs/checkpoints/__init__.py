"""Models read from checkpoint folders, whose weights need not fit into memory."""
