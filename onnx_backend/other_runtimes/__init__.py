"""Runtimes as applications open them: a model is compiled there and run, to compare what it computes."""
