"""ModelProto and its tensors: reading, writing, searching, external data."""
