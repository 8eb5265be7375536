"""Integer-only: from a Q/DQ model to a graph of integers, its checker and its NumPy reference. Import the files."""
