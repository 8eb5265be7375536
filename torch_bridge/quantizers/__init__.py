"""The module that quantizes at a site, its arithmetic and its learned scales."""
