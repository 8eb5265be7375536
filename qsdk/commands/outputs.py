"""The file that a command writes: refused before the work where it cannot be one."""

from pathlib import Path

from qsdk.core.errors import ConfigError


def require_output(path: str) -> None:
    """Refuse a name that is no file's, before minutes of work are spent on what it should hold.

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
