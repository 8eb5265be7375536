"""What torch gives and takes: nested values, parameters, kinds of layers, sharding."""
