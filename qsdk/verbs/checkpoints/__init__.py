"""From a checkpoint folder to an exported model, for weights that need not fit into memory."""
