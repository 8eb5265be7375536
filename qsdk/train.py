"""What serves training beside `sim.training` and `qsdk.distill_loss`: texts, schedules, learned ranges, callbacks."""

from qsdk.core.callbacks import callbacks
from qsdk.verbs.ranges import tune_ranges
from qsdk.verbs.text import generate_text
from qsdk.verbs.training import Distilled, freeze_ranges

__all__ = ["Distilled", "callbacks", "freeze_ranges", "generate_text", "tune_ranges"]
