"""LSTM and GRU in fixed point, unrolled or in a Scan."""
