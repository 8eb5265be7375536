"""Tensors that no grid serves: divisors, positions, angles, masks, and the bounds that prove it."""
