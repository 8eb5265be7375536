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
        "training step of a ResNet-14 with learned scales, over the float step",
        "qat_step resnet14",
        ("resnet14", "learned"),
        "<= 1.25",
    ),
)

ONNX: tuple[Goal, ...] = ()

GROUPS = {"PyTorch modules": PYTORCH, "ONNX files and integers": ONNX}
