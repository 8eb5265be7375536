"""Arithmetic on integers of 64 bits between quantizers, with proven bounds and errors. Import the files."""
