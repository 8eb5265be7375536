"""One pass over the data, with the values of sites handed to a visitor."""
