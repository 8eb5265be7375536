"""Products whose sizes the file leaves open."""

from integer_models import Net


def dynamic_product():
    """A product of two activations, whose accumulator is bounded by the length of its sums."""
    net = Net()
    x = net.qdq(net.input(["n", 4, "length"]), 0.031, 117)
    net.output(net.qdq(net.op("MatMul", x, net.op("Transpose", x, perm=[0, 2, 1])), 0.17, 120), ["n", 4, 4])
    return net.model()
