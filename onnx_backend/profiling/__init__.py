"""Where the time of a model goes: the kernels that a runtime runs for it, as its own profiler times them."""
