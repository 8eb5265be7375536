"""From a file or a trace to a marked model, its graph and its plan."""
