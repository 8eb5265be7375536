"""The goals: what is measured, by which benchmark under which key of its JSON line, and what is aimed at.

Plain data, read by `goals.py`. A note says what a number is of, or the floor where a goal cannot be met.
"""

import operator
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """One row of the table.

    Attributes:
        work: what is measured, unique among the rows, in words for users.
        command: a benchmark (the stem of its file) and its options.
        key: where the number stands in a JSON line that the benchmark prints, from the outermost name.
        goal: `<= number` or `>= number`.
        note: what a reader must know to read the number.
    """

    work: str
    command: str
    key: tuple[str, ...]
    goal: str
    note: str = ""

    @property
    def benchmark(self) -> str:
        """The stem of the file."""
        return self.command.split()[0]

    def is_met(self, value: float) -> bool:
        """Return whether a measured value reaches the goal."""
        sign, _, number = self.goal.partition(" ")
        return bool({"<=": operator.le, ">=": operator.ge}[sign](value, float(number)))


PYTORCH = (
    Goal(
        "`quantize` of a module, over torch's float export of it: median of four networks",
        "tracing",
        ("all", "median"),
        "<= 1.3",
        "from one linear layer to a decoder of four layers",
    ),
    Goal(
        "`quantize` of a module, over torch's float export of it: the worst of four networks",
        "tracing",
        ("all", "worst"),
        "<= 2",
    ),
    Goal(
        "`quantize` of a decoder of 22 layers, over torch's float export of it",
        "tracing",
        ("a decoder of 22 layers", "over_float_export"),
        "<= 1.5",
    ),
    Goal(
        "min-max calibration of MiniLM, float passes",
        "calibration mini_lm",
        ("mini_lm", "batch 16", "min_max"),
        "<= 1.1",
        "64 texts; ranges of weights and encodings cost the same for any number",
    ),
    Goal(
        "tf_enhanced calibration of MiniLM, float passes",
        "calibration mini_lm",
        ("mini_lm", "batch 16", "tf_enhanced"),
        "<= 1.2",
        "64 texts; the search of 100 tensors costs the same for any number",
    ),
    Goal(
        "extra memory of AdaRound, ResNet-14 and 512 images, MiB",
        "adaround_memory",
        ("extra",),
        "<= 200",
        "weights of 4 bits; beyond what a calibrated sim and the images hold",
    ),
    Goal(
        "training step of a ResNet-14 with learned scales, over the float step",
        "qat_step resnet14",
        ("resnet14", "learned"),
        "<= 1.25",
        "eager; BatchNorms folded on both sides; with PyTorch's own fake quantization at the same places 1.8",
    ),
    Goal(
        "the same with compiled kernels, over the eager float step",
        "qat_step resnet14 --compile=kernels",
        ("resnet14", "learned"),
        "<= 1.15",
        "on processors with AVX-512 they gain nothing over eager ones",
    ),
    Goal(
        "`mixed_precision` of MobileNetV2, evaluations of the metric",
        "mixed_precision search",
        ("mobilenet_v2", "search", "evaluations"),
        "<= 12",
        "that of the float model included; W8A8 meets the budget at once here, so nothing is searched",
    ),
)

_SEEDS = 'ptq_seeds mobile --config=W3A8 --seeds=0,1,2 --methods="seq_mse;adaround;seq_mse, adaround"'
_PASSES = 'ptq_tables mobile --config=W3A8 --methods="seq_mse;adaround;seq_mse, adaround"'
_TRAININGS = (
    "mean of three trainings, whose standard error is 0.08; with float weights 0.01, by soft rounding of 500 steps "
    "(115 passes) 0.25"
)

ALGORITHMS = (
    Goal(
        "`seq_mse` and `adaround`, inverted residuals, W3A8: points of accuracy lost",
        _SEEDS,
        ("mobile", "seq_mse, adaround", "drop"),
        "<= 0.1",
        _TRAININGS,
    ),
    Goal(
        "the same, float passes",
        _PASSES,
        ("mobile", "W3A8", "seq_mse, adaround", "passes"),
        "<= 25",
    ),
    Goal(
        "`adaround` alone, inverted residuals, W3A8: points of accuracy lost",
        _SEEDS,
        ("mobile", "adaround", "drop"),
        "<= 0.1",
        _TRAININGS,
    ),
    Goal(
        "`seq_mse` alone, inverted residuals, W3A8: points of accuracy lost",
        _SEEDS,
        ("mobile", "seq_mse", "drop"),
        "<= 0.3",
        f"{_TRAININGS}; with 80 candidates 0.37",
    ),
    Goal(
        "`seq_mse` and `adaround`, EfficientNet-Lite0, W4A8: points of top-1 accuracy lost",
        "imagenet_rounding efficientnet_lite0",
        ("efficientnet_lite0", "seq_mse, adaround", "drop"),
        "<= 1.0",
        "crops of ten photographs, calibrated on ten others: two points are noise; rounded to nearest 71 are lost",
    ),
    Goal(
        "`seq_mse` in blocks of 64, eight Linear(1024), two threads, float passes by the clock",
        "ptq_seq_mse stack --threads=2",
        ("stack_block_64", "passes"),
        "<= 6",
        "the matrix products alone, in stock kernels, are the benchmark's `floor`",
    ),
)

_SIMULATION = "onnx_simulation"
_CLOCK = "by the clock, with the runtime's own number of threads, on sessions that are open"
_KERNELS = "beside float's kernels it runs a QuantizeLinear and a DequantizeLinear for each site, and nothing else"
_EIGHT = "8 pictures: ranges of weights and encodings of all sites cost the same for any number of them"
_COUNTED = "8 pictures: a search of 131 tensors, once for any number of them, is a large part of it"

_FILES = {
    "demo": "the demo network",
    "yolov8n": "a YOLOv8n",
    "mobilenet_v2": "MobileNetV2",
    "transformer": "a transformer of four blocks",
}
_CALIBRATED = dict.fromkeys(_FILES, 1.3)
_HISTOGRAMS = {"demo": 2.0, "yolov8n": 2.0, "mobilenet_v2": 2.0}
_NOTES = {
    ("demo", "simulate"): _KERNELS,
    ("yolov8n", "simulate"): _KERNELS,
    ("yolov8n", "min_max"): _EIGHT,
    ("yolov8n", "tf_enhanced"): _COUNTED,
}

SIMULATION: tuple[Goal, ...] = tuple(
    Goal(
        f"{work} of {_FILES[network]}, float passes",
        _SIMULATION,
        (network, key),
        f"<= {most}",
        _NOTES.get((network, key), _CLOCK),
    )
    for key, work, limits in (
        ("simulate", "simulated forward", {"demo": 1.2, "yolov8n": 1.25, "mobilenet_v2": 1.5}),
        ("min_max", "min-max calibration", _CALIBRATED),
        ("tf_enhanced", "tf_enhanced calibration", _HISTOGRAMS),
    )
    for network, most in limits.items()
)

_LAYERS = "onnx_layers"
_TWO_KERNELS = "two QLinearConv and a Max; one QLinearConv of the same size is `conv relu` of the benchmark"
_UNSIGNED = '`config.for_dialect("onnxruntime")`; `qdq` of the benchmark is the default config'
_UNROLLED = (
    "unrolled, in fixed point with a stated error; `floors_integer`: float operators unrolled 1.9, 8-bit ones 2.8"
)
_SCANNED = "a Scan over the same steps; the file serves any length"
_LARGER = "the same layer at a size of speech models, where products take more of the time than the nodes around them"

ONNX: tuple[Goal, ...] = (
    Goal(
        "exported Linear 512 x 512, one row, over float",
        _LAYERS,
        ("linear 512-512, 1 row", "unsigned"),
        "<= 1.0",
        _UNSIGNED,
    ),
    Goal(
        "exported Linear 512 x 512, 64 rows, over float",
        _LAYERS,
        ("linear 512-512, 64 rows", "unsigned"),
        "<= 1.0",
        _UNSIGNED,
    ),
    Goal(
        "exported LSTMCell, 8 steps of 400 to 1024, over float",
        _LAYERS,
        ("lstm cell 400-1024, 8 steps", "unsigned"),
        "<= 1.0",
        _UNSIGNED,
    ),
    Goal(
        "exported GRUCell, 8 steps of 400 to 1024, over float",
        _LAYERS,
        ("gru cell 400-1024, 8 steps", "unsigned"),
        "<= 1.0",
        _UNSIGNED,
    ),
    Goal(
        "integer-only LSTM, 16 steps of 64 to 128, over float",
        _LAYERS,
        ("lstm 64-128, 16 steps", "standard"),
        "<= 3",
        _UNROLLED,
    ),
    Goal(
        "integer-only GRU, 16 steps of 64 to 128, over float",
        _LAYERS,
        ("gru 64-128, 16 steps", "standard"),
        "<= 3",
        _UNROLLED,
    ),
    Goal(
        "integer-only LSTM of open length, on 16 steps of 64 to 128, over float",
        _LAYERS,
        ("lstm 64-128, open length", "standard"),
        "<= 3",
        _SCANNED,
    ),
    Goal(
        "integer-only GRU of open length, on 16 steps of 64 to 128, over float",
        _LAYERS,
        ("gru 64-128, open length", "standard"),
        "<= 3",
        _SCANNED,
    ),
    Goal(
        "integer-only LSTM of open length, on 30 steps of 80 to 512, over float",
        _LAYERS,
        ("lstm 80-512, open length", "standard"),
        "<= 3",
        _LARGER,
    ),
    Goal(
        "integer-only GRU of open length, on 30 steps of 80 to 512, over float",
        _LAYERS,
        ("gru 80-512, open length", "standard"),
        "<= 3",
        _LARGER,
    ),
    Goal(
        "integer-only Conv and LeakyRelu, target `onnxruntime`, over float",
        _LAYERS,
        ("conv leaky relu", "onnxruntime"),
        "<= 0.7",
        _TWO_KERNELS,
    ),
    Goal(
        "integer-only Conv and PRelu, target `onnxruntime`, over float",
        _LAYERS,
        ("conv prelu", "onnxruntime"),
        "<= 0.7",
        _TWO_KERNELS,
    ),
)

_WEIGHTS = "weights of the dtype that `to_integer` chooses on this processor"

INTEGERS = (
    Goal(
        "integer-only MiniLM, target `onnxruntime`, over the session of its Q/DQ file",
        "integer_speed --network=mini_lm --threads=1",
        ("onnxruntime / qdq",),
        "<= 1.0",
        f"{_WEIGHTS}; `floors_integer`: its products and one kernel a term 1.03",
    ),
    Goal(
        "integer-only YOLOv8n, target `onnxruntime`, over float",
        "integer_speed --threads=1",
        ("onnxruntime",),
        "<= 0.4",
        _WEIGHTS,
    ),
    Goal(
        "integer-only YOLOv8n, target `standard`, over float",
        "integer_speed --threads=1",
        ("standard",),
        "<= 1.2",
        "`floors_integer`: ConvInteger alone 0.8, with the fewest nodes that give exact codes 1.25",
    ),
    Goal(
        "`make demo` after set-up, seconds",
        "demo_floor",
        ("demo",),
        "<= 10",
        "the same steps of stock libraries alone are the benchmark's `floor`",
    ),
    Goal(
        "integer-only demo network, target `portable` over `standard`",
        "portable demo",
        ("portable / standard",),
        "<= 1.5",
        "the same integers in every runtime",
    ),
    Goal(
        "integer-only MiniLM, target `portable` over `standard`",
        "portable mini_lm",
        ("portable / standard",),
        "<= 1.5",
    ),
    Goal(
        "27 networks by the default export, over ONNX Runtime's own static quantization: median",
        "deployed --batches 1 --threads 1",
        ("all", "ours", "median_over_stock"),
        "<= 0.85",
        "those above 0.5 ms, in an ordinary session; convolutions run in the same kernels, see results/deployed.md",
    ),
    Goal(
        "the same: the worst network",
        "deployed --batches 1 --threads 1",
        ("all", "ours", "worst_over_stock"),
        "<= 1",
    ),
    Goal(
        'the same by `for_dialect("onnxruntime")`: median',
        "deployed --batches 1 --threads 1",
        ("all", "dialect", "median_over_stock"),
        "<= 0.85",
    ),
    Goal(
        'the same by `for_dialect("onnxruntime")`: the worst network',
        "deployed --batches 1 --threads 1",
        ("all", "dialect", "worst_over_stock"),
        "<= 1",
    ),
    Goal(
        "SQNR of these files over that of ONNX Runtime's own tool, dB: median",
        "deployed --batches 1 --threads 1",
        ("all", "dialect", "median_gain_db"),
        ">= 1",
    ),
    Goal(
        "generated C at `-O3`, over the session of the Q/DQ file: the worst of three networks",
        "firmware",
        ("worst", "-O3"),
        "<= 8",
        "instructions of every x86-64 (SSE2) beside kernels of this processor; the networks are those of the guide",
    ),
    Goal(
        "the same at `-O3 -march=native`",
        "firmware",
        ("worst", "-O3 -march=native"),
        "<= 8",
    ),
)

GROUPS = {
    "PyTorch modules": PYTORCH,
    "Algorithms": ALGORITHMS,
    "Simulation of ONNX files": SIMULATION,
    "Layers of exported files and of integer-only ones": ONNX,
    "Integer-only networks": INTEGERS,
}
