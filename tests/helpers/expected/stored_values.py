"""The bytes of all stored tensors of a sim."""


def stored_bytes(sim):
    """Every stored tensor, as bytes."""
    if hasattr(sim, "model"):
        own = {name for q in sim.quantizers.values() for name in q.buffer_names}
        state = sim.model.state_dict()
        return {name: x.numpy().tobytes() for name, x in state.items() if name.rpartition(".")[2] not in own}
    return {tensor.name: tensor.SerializeToString() for tensor in sim.traced().model.graph.initializer}
