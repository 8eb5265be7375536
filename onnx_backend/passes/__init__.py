"""From a model to a model that computes the same function."""
