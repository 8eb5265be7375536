"""The errors that users meet.

    QsdkError
    ├── ConfigError        a rule, dtype or option that makes no sense
    ├── ModelError         a model that cannot be quantized as it is
    ├── DataError          calibration data of the wrong shape, kind or value
    ├── CalibrationError   an encoding that is missing where it is needed
    ├── ExportError        something that cannot be written as asked
    ├── FileFormatError    a file that is truncated, foreign or inconsistent
    └── IntegerError       an op that cannot be made integer-only

Every message says what happened, where (site, node or file) and the remedy.
"""


class QsdkError(Exception):
    """Base of all errors that qsdk raises on purpose."""


class ConfigError(QsdkError, ValueError):
    """A rule, dtype or option that makes no sense."""


class ModelError(QsdkError, ValueError):
    """A model that cannot be quantized as it is."""


class DataError(QsdkError, ValueError):
    """Calibration data of the wrong shape, kind or value."""


class CalibrationError(QsdkError, RuntimeError):
    """An encoding that is missing where it is needed."""


class ExportError(QsdkError, RuntimeError):
    """Something that cannot be written as asked."""


class FileFormatError(QsdkError, ValueError):
    """A file that is truncated, foreign or inconsistent."""


class IntegerError(QsdkError, RuntimeError):
    """An op that cannot be made integer-only."""
