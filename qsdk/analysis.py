"""What measures models beside `qsdk.sensitivity` and `qsdk.compare`: time, texts, precision, sums of integers."""

from qsdk.verbs.analysis.accumulators import accumulators
from qsdk.verbs.analysis.precision import advise
from qsdk.verbs.analysis.profile import profile
from qsdk.verbs.text import error_by_position, next_token_agreement, perplexity

__all__ = ["accumulators", "advise", "error_by_position", "next_token_agreement", "perplexity", "profile"]
