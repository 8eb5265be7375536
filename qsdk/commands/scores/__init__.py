"""The commands that score a model: on labels, or by a metric of the user."""
