"""Two runs of one network side by side: their tensors matched, laid alike, and the first one that is off."""
