"""From the inputs of layers to layer problems: second moments, samples and patches."""
