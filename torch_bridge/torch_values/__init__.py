"""Values of torch: nested values, batches, parameters, kinds of layers, sharding."""
