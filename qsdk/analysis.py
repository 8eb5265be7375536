"""What measures models beside `qsdk.sensitivity` and `qsdk.compare`: time, quality on texts, advice on precision."""

from qsdk.verbs.analysis.precision import advise
from qsdk.verbs.analysis.profile import profile
from qsdk.verbs.text import error_by_position, next_token_agreement, perplexity

__all__ = ["advise", "error_by_position", "next_token_agreement", "perplexity", "profile"]
