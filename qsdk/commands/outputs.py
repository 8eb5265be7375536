"""The output path of a command, checked before the work begins."""

from pathlib import Path

from qsdk.core.errors import ConfigError


def require_output(path: str) -> None:
    """Raise an error for an output path that cannot be written, before minutes of work are spent.

    Args:
        path: the file to write.

    Raises:
        ConfigError: `path` is a directory or lies in a folder that does not exist.
    """
    target = Path(path)
    if not target.name or target.is_dir():
        raise ConfigError(f"cannot write: {path or 'the path'} is a directory; give the name of a file")
    if not target.parent.is_dir():
        raise ConfigError(f"cannot write {path}: create the folder {target.parent} first, or choose another")
