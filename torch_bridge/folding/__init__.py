"""BatchNorm and computed weights, folded into plain layers."""
