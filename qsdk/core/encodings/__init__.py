"""Files of encodings, and finding the tensors that they speak of in a model."""
