"""Planning of what is stored: weights, embeddings, constants and biases."""

from dataclasses import replace

import pytest
from plans import embedding, inside, matmul_network, site, small_network, spec_of
from strategies import GraphBuilder

from qsdk.core.config.config import QuantConfig, w4a8, w8a8, w8a16, weight_only
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import float16, int4, int8, int32, uint8, uint16
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.planning.make_plan import make_plan

# stored tensors


@pytest.mark.parametrize("bias_first", [False, True])
def test_matmul_and_add_are_one_linear_layer(bias_first: bool):
    plan = make_plan(matmul_network(bias_first=bias_first), w8a8())
    assert spec_of(plan, "fc:weight") == Spec(int8, PerChannel(1))
    assert spec_of(plan, "fc:bias") == Spec(int32, PerChannel(0))
    assert site(plan, "fc:bias").bias_of == ("x:input", "fc:weight")
    assert inside(plan, "MatMul") == ["inside MatMul+Add"]
    assert site(plan, "fc:output").reason == "MatMul+Add"


@pytest.mark.parametrize("shape", [(1, 7), (2, 7)])
def test_an_addend_that_is_not_one_value_per_column_is_a_constant(shape: tuple[int, ...]):
    plan = make_plan(matmul_network(bias_shape=shape), w8a8())
    assert spec_of(plan, "fc:bias") == Spec(int8, PerTensor())
    assert site(plan, "fc:bias").reason == "constant"


def test_an_addend_of_one_value_is_a_scalar():
    plan = make_plan(matmul_network(bias_shape=(1,)), w8a8())
    assert (site(plan, "fc:bias").spec, site(plan, "fc:bias").reason) == (None, "a scalar constant")


def test_a_vector_added_to_a_convolution_runs_along_its_width_and_is_no_bias():
    b = GraphBuilder()
    y = b.op("Add", [b.conv(b.input(), "conv"), b.stored("shift:weight", (8,))], "add:output")
    plan = make_plan(b.graph(y), w8a8())
    assert site(plan, "shift:weight").kind == "weight"
    assert site(plan, "conv:output").state == "quantized"


@pytest.mark.parametrize(("shape", "expected"), [((10,), int32), ((1, 10), int8)])
def test_gemms_third_operand_is_a_bias_only_as_a_vector(shape: tuple[int, ...], expected):
    b = GraphBuilder()
    x = b.input(shape=(1, 6))
    y = b.op("Gemm", [x, b.stored("fc:weight", (6, 10)), b.stored("fc:bias", shape)], "fc:output", (1, 10))
    plan = make_plan(b.graph(y), w8a8())
    assert spec_of(plan, "fc:bias").dtype == expected
    assert spec_of(plan, "fc:weight").granularity == PerChannel(1)


@pytest.mark.parametrize("perm", [[1, 0], None])
def test_the_axis_of_a_weight_behind_a_transpose_is_that_of_the_stored_tensor(perm):
    b = GraphBuilder()
    x, w = b.input(shape=(2, 6)), b.stored("fc:weight", (7, 6))
    view = b.op("Transpose", [w], None, (6, 7), **({} if perm is None else {"perm": perm}))
    y = b.op("Add", [b.op("MatMul", [x, view], None, (2, 7)), b.stored("fc:bias", (7,))], "fc:output", (2, 7))
    plan = make_plan(b.graph(y), w8a8())
    assert spec_of(plan, "fc:weight").granularity == PerChannel(0)
    assert spec_of(make_plan(b.graph(y), w8a8(block_size=2)), "fc:weight").granularity == PerBlock(1, 2)
    assert spec_of(plan, "fc:bias") == Spec(int32, PerChannel(0))
    assert inside(plan, "Transpose") == []
    assert "a view of fc:weight" in [d.reason for d in plan.inside]


def test_a_matmul_with_its_weight_on_the_left():
    b = GraphBuilder()
    x = b.input(shape=(6, 2))
    plan = make_plan(b.graph(b.op("MatMul", [b.stored("fc:weight", (7, 6)), x], "fc:output", (7, 2))), w8a8())
    assert spec_of(plan, "fc:weight").granularity == PerChannel(0)


def transposed_convolution(group: int) -> Graph:
    b = GraphBuilder()
    operands = [b.input(), b.stored("up:weight", (4, 3, 3, 3)), b.stored("up:bias", (3 * group,))]
    return b.graph(b.op("ConvTranspose", operands, "up:output", group=group))


def test_output_channels_of_a_transposed_convolution_are_on_axis_1():
    plan = make_plan(transposed_convolution(1), w8a8())
    assert spec_of(plan, "up:weight").granularity == PerChannel(1)
    assert spec_of(plan, "up:bias") == Spec(int32, PerChannel(0))


def test_a_grouped_transposed_convolution_has_fewer_scales_than_biases():
    plan = make_plan(transposed_convolution(2), w8a8())
    assert spec_of(plan, "up:weight").granularity == PerChannel(1)
    assert site(plan, "up:bias").spec is None
    assert site(plan, "up:bias").reason == "its weight's scales are shared by groups, so they do not count its channels"
    plan = make_plan(transposed_convolution(2), replace(w8a8(), per_channel=False))
    assert spec_of(plan, "up:bias") == Spec(int32, PerTensor())


def test_an_embedding_stays_at_8_bits_under_4_bit_weights():
    plan = make_plan(embedding(), w4a8())
    assert spec_of(plan, "emb:weight") == Spec(uint8, PerTensor(), symmetric=False)
    assert spec_of(plan, "fc:weight") == Spec(int4, PerChannel(1))
    assert "ids:input" not in plan.decisions


def test_a_rule_that_names_the_embedding_decides_it():
    assert spec_of(make_plan(embedding(), w4a8().override("emb", weight=int4)), "emb:weight").dtype == int4
    assert spec_of(make_plan(embedding(), w4a8().override("*", weight=int4)), "emb:weight").dtype == uint8
    assert spec_of(make_plan(embedding(), w4a8().override("emb", activation=uint16)), "emb:weight").dtype == int8


def test_an_embedding_has_blocks_where_a_rule_names_it():
    blocks = replace(w4a8(), block_size=4)
    assert spec_of(make_plan(embedding(), blocks), "emb:weight").granularity == PerTensor()
    plan = make_plan(embedding(), blocks.override("emb", weight=int4, block_size=4))
    assert spec_of(plan, "emb:weight") == Spec(int4, PerBlock(1, 4))


def test_rows_of_a_table_are_on_its_grid():
    plan = make_plan(embedding(), w8a8())
    rows = site(plan, "emb:output")
    assert (rows.tied_to, rows.passes_through, rows.reason) == ("emb:weight", True, "holds rows of emb:weight")
    assert rows.spec == spec_of(plan, "emb:weight")


@pytest.mark.parametrize(
    "config",
    [
        w8a8().override("emb", weight=int8),
        w8a8().override("emb", activation=uint16),
        replace(w8a8(), symmetric_weights=True),
        w8a8().override("emb:output", fixed_range=(-1.0, 1.0)),
    ],
)
def test_rows_of_a_table_have_their_own_grid_where_it_is_chosen(config: QuantConfig):
    plan = make_plan(embedding(), config)
    assert site(plan, "emb:output").tied_to is None
    assert spec_of(plan, "emb:weight") == Spec(int8, PerTensor())


def test_signed_activations_share_the_grid_of_a_table_of_int8():
    plan = make_plan(embedding(), replace(w8a8(), activation=int8, symmetric_activations=True))
    assert spec_of(plan, "emb:weight") == Spec(int8, PerTensor())
    assert site(plan, "emb:output").tied_to == "emb:weight"


def test_a_table_alone_keeps_its_weights():
    assert spec_of(make_plan(embedding(), weight_only("int8")), "emb:weight") == Spec(int8, PerTensor())


@pytest.mark.parametrize("config", [w4a8(), w8a8().override("*", weight="int4")], ids=["config", "rule"])
def test_what_keeps_8_bits_says_so_and_names_no_rule(config: QuantConfig):
    kept = site(make_plan(embedding(), config), "emb:weight")
    assert kept.reason == "embedding; 8 bits: int4 is for weights of layers, unless a rule names this one"
    assert kept.rule == "default"
    also = config.override("*", per_channel=False)  # another choice of another rule does apply
    assert site(make_plan(embedding(), also), "emb:weight").rule == "'*' -> per_channel=False"
    named = site(make_plan(embedding(), config.override("emb", weight="int4")), "emb:weight")
    assert (named.reason, named.rule) == ("embedding", "'emb' -> weight=int4")


def test_a_parameter_read_in_two_places_is_one():
    b = GraphBuilder()
    ids, x = b.input("ids", (2,), "int64"), b.input(shape=(2, 8))
    table = b.stored("emb:weight", (50, 8))
    first = b.op("Gather", [table, ids], "emb:output", (2, 8))
    shared = b.op("Identity", [table], "head:weight", (50, 8))
    view = b.op("Transpose", [shared], None, (8, 50), perm=[1, 0])
    plan = make_plan(b.graph(first, b.op("MatMul", [x, view], "head:output", (2, 50))), w8a8())
    assert site(plan, "head:weight").tied_to == "emb:weight"
    assert site(plan, "head:weight").reason == "the same parameter as emb:weight"
    assert spec_of(plan, "head:weight") == spec_of(plan, "emb:weight")


def test_statistics_of_a_norm_stay_float_with_a_reason():
    b = GraphBuilder()
    y = b.op("LayerNormalization", [b.input(), b.stored("ln:weight", (8,)), b.stored("ln:bias", (8,))], "ln:output")
    plan = make_plan(b.graph(y), w8a8())
    assert spec_of(plan, "ln:weight") == Spec(int8, PerTensor())
    assert site(plan, "ln:bias").spec is None
    assert site(plan, "ln:bias").reason == "a parameter of LayerNormalization that has no integer form of its own"


def normalized(op_type: str, count: int) -> Graph:
    b = GraphBuilder()
    parameters = [b.stored(f"norm:{name}", (8,)) for name in ("weight", "bias", "mean", "var")[:count]]
    return b.graph(b.op(op_type, [b.input(), *parameters], "norm:output"))


@pytest.mark.parametrize("op_type", ["LayerNormalization", "GroupNormalization", "InstanceNormalization"])
def test_a_float16_rule_keeps_all_parameters_of_a_norm_in_float16(op_type: str):
    plan = make_plan(normalized(op_type, 2), w8a8().skip("norm", float16))
    for port in ("weight", "bias", "output"):
        assert spec_of(plan, f"norm:{port}") == Spec(float16)
        assert site(plan, f"norm:{port}").rule == "'norm' -> weight=float16, activation=float16, bias=float16"


def test_of_a_batch_norm_a_float16_rule_rounds_the_result_alone_and_says_so():
    plan = make_plan(normalized("BatchNormalization", 4), w8a8().skip("norm", float16))
    assert spec_of(plan, "norm:output") == Spec(float16)
    for port in ("weight", "bias", "mean", "var"):
        assert site(plan, f"norm:{port}").spec is None
        assert site(plan, f"norm:{port}").reason.endswith("rounds the result of the BatchNorm alone to float16")
    for config in (w8a8(), w8a8().skip("norm")):
        reason = site(make_plan(normalized("BatchNormalization", 4), config), "norm:var").reason
        assert reason == "a parameter of BatchNormalization that has no integer form of its own"


# biases


def test_biases_stay_float_beside_16_bit_activations():
    plan = make_plan(small_network(), w8a16())
    assert site(plan, "fc:bias").spec is None
    assert site(plan, "fc:bias").reason == "its input is not an integer of 8 bits or fewer"


def test_biases_stay_float_beside_16_bit_weights():
    plan = make_plan(small_network(), w8a8().override("fc", weight="int16"))
    assert site(plan, "fc:bias").reason == "its weight is not an integer of 8 bits or fewer"
    assert site(plan, "conv2:bias").state == "quantized"


def test_biases_stay_float_beside_block_weights():
    plan = make_plan(matmul_network(), w4a8(block_size=3))
    assert spec_of(plan, "fc:weight") == Spec(int4, PerBlock(0, 3))
    assert site(plan, "fc:bias").spec is None
    assert site(plan, "fc:bias").reason == "its weight has one scale per block, so no one scale fits an accumulator"


def test_biases_follow_per_tensor_weights():
    plan = make_plan(small_network(), replace(w8a8(), per_channel=False))
    assert spec_of(plan, "fc:bias") == Spec(int32, PerTensor())
    assert spec_of(plan, "fc:weight") == Spec(int8, PerTensor())


def test_biases_stay_float_by_choice():
    plan = make_plan(small_network(), w8a8().override("fc", bias="float32"))
    assert site(plan, "fc:bias").reason == "kept float32 by a rule"
    assert site(plan, "fc:bias").spec is None


def test_a_bias_takes_the_scale_of_what_its_input_is_tied_to():
    plan = make_plan(small_network(), w8a8())
    assert site(plan, "fc:bias").bias_of == ("conv2:output", "fc:weight")


def test_blocks_do_not_run_along_an_axis_of_one():
    b = GraphBuilder()
    y = b.op("Conv", [b.input(), b.stored("dw:weight", (3, 1, 3, 3))], "dw:output", group=3)
    assert spec_of(make_plan(b.graph(y), w4a8(block_size=16)), "dw:weight").granularity == PerChannel(0)


def test_a_matrix_that_is_reshaped_before_a_product_is_float_with_a_true_reason():
    reasons = {}
    for name in ("", "m/reshape.0:output"):
        b = GraphBuilder()
        moved = b.op("Reshape", [b.stored("m:weight", (2, 3, 4)), b.stored("shape", (2,))], name or None)
        y = b.op("MatMul", [b.input(), moved], "m:output")
        reasons[name] = site(make_plan(b.graph(y), w8a8()), "m:weight").reason
    assert reasons[""].startswith("Reshape moves it before MatMul reads it; what an op reads as it is stored")
    assert reasons["m/reshape.0:output"] == "Reshape hands it on to a site"
