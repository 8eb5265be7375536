"""Files of encodings, and matching their entries to the tensors of a model."""
