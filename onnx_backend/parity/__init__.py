"""A file held against its sim: sites, stored numbers, nodes and outputs."""
