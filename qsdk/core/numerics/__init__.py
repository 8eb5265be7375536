"""Dtypes with their grids, the formula, and encodings: how numbers become integers and floats again."""
