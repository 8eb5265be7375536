"""From statistics of a tensor to its range, and the sites whose range no grid can serve."""
