"""Classes that read their parameters through quantizers, and the dataflow that a forward pass reveals."""
