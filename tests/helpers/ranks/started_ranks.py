"""Start the ranks of a test as processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def started(worker: str, size: int, folder: Path) -> list[Any]:
    """What each of so many processes of a worker of this folder has written down."""
    script, outs = Path(__file__).parent / worker, [folder / f"{size}-{rank}.json" for rank in range(size)]
    command, environment = [sys.executable, str(script)], {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder / f"store{size}"), str(out)], cwd=script.parent, env=environment
        )
        for rank, out in enumerate(outs)
    ]
    assert [worker.wait(timeout=240) for worker in workers] == [0] * size
    return [json.loads(out.read_text()) for out in outs]
