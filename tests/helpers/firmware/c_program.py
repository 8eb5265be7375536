"""The C program of the examples with a network's header, compiled, and runs of it."""

import shutil
import subprocess
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "firmware"

MAIN = EXAMPLE / "main.c"

COMPILER = shutil.which("cc")

FLAGS = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-O2"]


def compiled(text, folder, *flags):
    (folder / "network.h").write_text(text)
    made = folder / "network"
    command = [COMPILER, *FLAGS, *flags, "-I", folder, MAIN, "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


def run(binary, data):
    return subprocess.run([binary], input=data, capture_output=True, check=True).stdout
