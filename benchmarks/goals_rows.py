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
    ),
    Goal(
        "tf_enhanced calibration of MiniLM, float passes",
        "calibration mini_lm",
        ("mini_lm", "batch 16", "tf_enhanced"),
        "<= 1.2",
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
        "eager; BatchNorms folded on both sides",
    ),
    Goal(
        "the same with compiled kernels, over the eager float step",
        "qat_step resnet14 --compile=kernels",
        ("resnet14", "learned"),
        "<= 1.15",
    ),
    Goal(
        "`mixed_precision` of MobileNetV2, evaluations of the metric",
        "mixed_precision search",
        ("mobilenet_v2", "search", "evaluations"),
        "<= 12",
        "that of the float model included; W8A8 meets the budget at once here, so nothing is searched",
    ),
)

_ROUNDED = 'ptq_tables mobile --config=W3A8 --methods="seq_mse;adaround;seq_mse, adaround"'
_SEARCHED = "the float network has 90.8 %; three seeds were not trained"

ALGORITHMS = (
    Goal(
        "`seq_mse` and `adaround`, inverted residuals, W3A8: accuracy in %",
        _ROUNDED,
        ("mobile", "W3A8", "seq_mse, adaround", "accuracy %"),
        ">= 90.7",
        _SEARCHED,
    ),
    Goal(
        "the same, float passes",
        _ROUNDED,
        ("mobile", "W3A8", "seq_mse, adaround", "passes"),
        "<= 25",
    ),
    Goal(
        "`adaround` alone, inverted residuals, W3A8: accuracy in %",
        _ROUNDED,
        ("mobile", "W3A8", "adaround", "accuracy %"),
        ">= 90.7",
        _SEARCHED,
    ),
    Goal(
        "`seq_mse` alone, inverted residuals, W3A8: accuracy in %",
        _ROUNDED,
        ("mobile", "W3A8", "seq_mse", "accuracy %"),
        ">= 90.5",
        _SEARCHED,
    ),
    Goal(
        "`seq_mse` in blocks of 64, eight Linear(1024), two threads, float passes by the clock",
        "ptq_seq_mse stack --threads=2",
        ("stack_block_64", "passes"),
        "<= 6",
        "with one thread, of processor time, the benchmark's default",
    ),
)

_SIMULATION = "onnx_simulation"
_CLOCK = "by the clock, with the runtime's own number of threads"

_FILES = {
    "demo": "the demo network",
    "yolov8n": "a YOLOv8n",
    "mobilenet_v2": "MobileNetV2",
    "transformer": "a transformer of four blocks",
}
_CALIBRATED = dict.fromkeys(_FILES, 1.3)
_HISTOGRAMS = {"demo": 2.0, "yolov8n": 2.0, "mobilenet_v2": 2.0}

SIMULATION: tuple[Goal, ...] = tuple(
    Goal(f"{work} of {_FILES[network]}, float passes", _SIMULATION, (network, key), f"<= {most}", _CLOCK)
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
_UNROLLED = "unrolled, in fixed point with a stated error"

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
        _WEIGHTS,
    ),
    Goal(
        "integer-only YOLOv8n, target `onnxruntime`, over float",
        "integer_speed --threads=1",
        ("onnxruntime",),
        "<= 0.4",
        _WEIGHTS,
    ),
    Goal("integer-only YOLOv8n, target `standard`, over float", "integer_speed --threads=1", ("standard",), "<= 1.2"),
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
)

GROUPS = {
    "PyTorch modules": PYTORCH,
    "Algorithms": ALGORITHMS,
    "Simulation of ONNX files": SIMULATION,
    "Layers of exported files and of integer-only ones": ONNX,
    "Integer-only networks": INTEGERS,
}
