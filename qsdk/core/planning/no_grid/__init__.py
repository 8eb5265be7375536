"""Tensors that no grid serves: divisors, positions, angles, masks, and what proves it."""
