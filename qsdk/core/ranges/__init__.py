"""From statistics of a tensor to its range, and which ranges no grid serves."""
