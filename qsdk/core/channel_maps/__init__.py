"""Maps of channels that leave the float model as it is: factors per channel and rotations, in the stored tensors."""
