"""A sim as a program of `torch.export`, its comparison with the sim, and ExecuTorch, which runs it."""
