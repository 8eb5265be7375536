"""One linear layer as a solver sees it, and the walk that provides the layers."""
