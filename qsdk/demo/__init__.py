"""A real model on real data, on which every claim of qsdk can be checked in two minutes."""
