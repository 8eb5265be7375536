"""Functions of values: tables, straight lines, softmax, norms, comparisons."""
