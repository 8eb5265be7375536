"""A real model on real data, so that every claim of qsdk can be run in two minutes."""
