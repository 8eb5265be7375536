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
        "that of the float model included; 12 is the bound that it keeps by default",
    ),
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

GROUPS = {"PyTorch modules": PYTORCH, "ONNX files and integers": ONNX}
