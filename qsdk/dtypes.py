"""Dtypes that few models need; wherever a dtype is asked for, the name does as well, as in `weight="mxfp4"`."""

from qsdk.core.numerics.dtypes import (
    BlockFormat,
    float8e4m3fnuz,
    float8e5m2fnuz,
    float8e8m0,
    mxfp4,
    mxfp8,
    mxint8,
    nvfp4,
)

__all__ = ["BlockFormat", "float8e4m3fnuz", "float8e5m2fnuz", "float8e8m0", "mxfp4", "mxfp8", "mxint8", "nvfp4"]
