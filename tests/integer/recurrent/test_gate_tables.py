"""The joined tables of gates: every integer within the bounds is found, within the stated error of float64."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.lowering.recurrent.cells import gate_table, look_up_gates
from onnx_backend.integer.reference.run import run_reference

FUNCTIONS = {"Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)), "Tanh": np.tanh}
GATES = [(("Sigmoid", 2), ("Tanh", 1)), (("Tanh", 3),), (("Sigmoid", 3),)]


def looked_up(table, lifted):
    b = Builder([], "half_even")
    name = look_up_gates(b, table, "x", 3)
    infos = [helper.make_tensor_value_info(each, TensorProto.INT64, None) for each in ("x", name)]
    graph = helper.make_graph(b.nodes, "table", infos[:1], infos[1:], b.initializers)
    return run_reference(helper.make_model(graph), {"x": lifted})[name]


@given(
    exponent=st.floats(-34.0, -20.0),
    size=st.floats(0.01, 500.0),
    fraction=st.integers(16, 30),
    gates=st.sampled_from(GATES),
    added=st.sampled_from([0, 2, 900]),
    seed=st.integers(0, 99),
)
def test_every_integer_is_found_within_the_stated_error(exponent, size, fraction, gates, added, seed):
    unit, addend = 2.0**exponent, added << fraction
    reach = int(size / unit) + 1
    table = gate_table(unit, reach, gates, fraction, addend=addend)
    rng = np.random.default_rng(seed)
    x = np.concatenate(
        [rng.integers(-reach, reach + 1, (40, 1, 3)), np.full((1, 1, 3), -reach), np.full((1, 1, 3), reach)]
    )
    lifted = x + table.lift
    assert lifted.min() >= 0
    assert lifted.max() <= table.bound
    found = np.ldexp((looked_up(table, lifted) - addend).astype(np.float64), -fraction)
    column = 0
    for name, count in gates:
        part = np.s_[..., column : column + count]
        wanted = FUNCTIONS[name](x[part] * unit)
        assert np.abs(found[part] - wanted).max() <= table.error(name, 0.0)
        assert table.error(name, 0.0) < 2.0 ** -min(fraction - 2, 19)
        column += count


def test_an_error_is_never_larger_than_the_function():
    table = gate_table(2.0**-24, 1 << 30, GATES[0], 28)
    assert table.error("Sigmoid", 1e9) == 1.0
    assert table.error("Tanh", 1e9) == 2.0
