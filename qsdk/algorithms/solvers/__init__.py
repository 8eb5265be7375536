"""Solvers of one layer problem: weight ranges, rounding and biases."""
