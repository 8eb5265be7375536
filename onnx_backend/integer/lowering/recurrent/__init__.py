"""LSTM and GRU, unrolled in fixed point."""
