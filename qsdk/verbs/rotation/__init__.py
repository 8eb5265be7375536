"""The verb that rotates the residual stream of a transformer."""
