"""The page `docs/guides/journeys.md`: four trades, each from a model to what it ships, in a few lines."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "journeys.md").read_text(encoding="utf-8")


def test_each_is_short():
    trades = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert len(trades) == 4
    for trade in trades:
        (*_, block) = re.findall(r"```(?:python|bash)\n(.*?)```", trade, flags=re.DOTALL)
        lines = [line for line in block.replace("\\\n", "").splitlines() if line.strip()]
        assert 5 < len(lines) < (10 if "ONNX file" in trade[:80] else 26), trade[:80]
