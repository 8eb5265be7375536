"""Statistics of sites, computed inside the graph."""
