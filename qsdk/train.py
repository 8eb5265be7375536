"""What serves training beside `sim.training` and `qsdk.distill_loss`: schedules, learned ranges, callbacks."""

from qsdk.core.callbacks import callbacks
from qsdk.verbs.ranges import tune_ranges
from qsdk.verbs.training import Distilled, freeze_ranges

__all__ = ["Distilled", "callbacks", "freeze_ranges", "tune_ranges"]
