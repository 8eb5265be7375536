"""What needs autograd through part of a network: blocks and ranges."""
