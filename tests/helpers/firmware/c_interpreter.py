"""The C interpreter of the examples, compiled, and runs of it."""

import shutil
import subprocess
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "c_interpreter"

INTERPRETER = EXAMPLE / "interpreter.c"

COMPILER = shutil.which("cc")

FLAGS = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2"]


def compiled(text, folder, *flags):
    (folder / "network.h").write_text(text)
    made = folder / "network"
    command = [COMPILER, *FLAGS, *flags, "-I", folder, INTERPRETER, "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


def run(binary, data):
    return subprocess.run([binary], input=data, capture_output=True, check=True).stdout
