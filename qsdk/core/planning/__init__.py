"""From a graph and a config to a decision for every tensor."""
