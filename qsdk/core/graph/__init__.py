"""The neutral graph of ops and tensors that both sides build."""
