"""Accuracy and cost of the post-training algorithms, network by network: one JSON line, and the tables of the docs.

Every method starts from a sim calibrated by min-max. A cost is the processor time of the whole verb on one thread, in
float forward passes over the calibration data in the same process; scores are those of data that was not calibrated on.
`python benchmarks/ptq_tables.py resnet14 mobile` measures a few; `--write` puts their tables into
`docs/results/ptq_tables.md`.
`--config="W8A16, weights per tensor"` measures that config alone, and writes nothing.
`--methods="seq_mse;seq_mse, adaround"` measures these rows alone, beside float and the first one, and with `--write`
replaces them in the tables.
"""

import json
import logging
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from ptq_cases import CASES, Case, Scores
from ptq_measure import float_pass, one_thread, seconds

import qsdk

DOCUMENT = Path(__file__).parents[1] / "docs" / "results" / "ptq_tables.md"
Work = Callable[[Any, list[Any]], object]


def again(**how: Any) -> Work:
    """Calibration with other estimators."""
    return lambda sim, batches: qsdk.calibrate(sim, batches, progress=False, **how)


def verb(*names: str) -> Work:
    """Verbs, one after the other."""

    def work(sim: Any, batches: list[Any]) -> None:
        for name in names:
            getattr(qsdk, name)(sim, batches, progress=False)

    return work


ESTIMATORS: dict[str, Work] = {
    "nearest, min_max": again(),
    "weights tf_enhanced": again(weight_method="tf_enhanced"),
    "weights mse": again(weight_method="mse"),
}
SOLVERS: dict[str, Work] = {
    "seq_mse": verb("seq_mse"),
    "gptq": verb("gptq"),
    "adaround": verb("adaround"),
    "seq_mse, adaround": verb("seq_mse", "adaround"),
    "correct_bias": verb("correct_bias"),
}
TUNED: dict[str, Work] = {"tune_blocks": verb("tune_blocks")}


def equalized(sim: Any, batches: list[Any]) -> None:
    """Factors between layers, ReLU6 made ReLU on the way."""
    qsdk.equalize(sim, batches, relu6="relu", progress=False)


def tuned_ranges(sim: Any, batches: list[Any]) -> None:
    """Ranges learned from where `mse` puts them, in steps of four samples each."""
    qsdk.calibrate(sim, batches, method="mse", progress=False)
    parts = [{name: x[at : at + 4] for name, x in batch.items()} for batch in batches for at in (0, 4)]
    qsdk.train.tune_ranges(sim, parts, progress=False)


EIGHT_BITS: dict[str, Work] = {
    "min_max": again(),
    "percentile": again(method="percentile"),
    "mse": again(method="mse"),
    "tf_enhanced": again(method="tf_enhanced"),
    "smooth_quant": verb("smooth_quant"),
}
WEIGHT_ONLY: dict[str, Work] = {"awq": verb("awq"), "awq, gptq": verb("awq", "gptq")}


#: compared at these configs; at all others the estimators of weights and the solvers
SPECIAL: dict[str, dict[str, Work]] = {
    "W8A8": EIGHT_BITS,
    "W8A8, sums per channel": {**EIGHT_BITS, "mse, tune_ranges": tuned_ranges},
    "W8A16, weights per tensor": {
        "min_max": again(),
        "equalize": equalized,
        "equalize, correct_bias": lambda sim, batches: (equalized(sim, batches), verb("correct_bias")(sim, batches)),
    },
    "W3A8, BatchNorms in float16": {
        "min_max": again(),
        "reestimate_batch_norm": verb("reestimate_batch_norm"),
        "adaround": verb("adaround"),
        "adaround, reestimate_batch_norm": verb("adaround", "reestimate_batch_norm"),
    },
    "W4 block 32": {**ESTIMATORS, **SOLVERS, **WEIGHT_ONLY},
}


def methods(case: Case, config: str) -> dict[str, Work]:
    """What is compared for a config."""
    usual = {**ESTIMATORS, **SOLVERS, **(TUNED if case.tuned else {})}
    return SPECIAL.get(config, usual)


def measured(case: Case, config: str, only: Collection[str] = ()) -> list[dict[str, Any]]:
    """One row for each method, or for those of `only` and the plain one; the first is the float network."""
    unit = float_pass(case.model, case.batches)
    rows: list[dict[str, Any]] = [{"method": "float", **rounded(case.score(case.model)), "passes": None}]
    for number, (name, work) in enumerate(methods(case, config).items()):
        if number and only and name not in only:
            continue
        sim = qsdk.quantize(case.model, case.batches[0], case.configs[config], **case.options)
        qsdk.calibrate(sim, case.batches, progress=False)
        spent = seconds(lambda work=work, sim=sim: work(sim, case.batches))
        rows.append({"method": name, **rounded(case.score(sim)), "passes": round(spent / unit, 1)})
        print(f"{case.title} {config}: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def rounded(scores: Scores) -> Scores:
    return {name: round(value, 4 if name == "cosine" else 2) for name, value in scores.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *[["" if row[key] is None else str(row[key]) for key in head] for row in rows]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write(case: Case, name: str, tables: dict[str, list[dict[str, Any]]]) -> None:
    """Put a network's tables between its marks in the document."""
    text = DOCUMENT.read_text()
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if start not in text:
        text = f"{text.rstrip()}\n\n{start}{end}\n"
    before, _, rest = text.partition(start)
    found = "\n\n".join(f"### {case.title}, {config}\n\n{table(rows)}" for config, rows in tables.items())
    DOCUMENT.write_text(f"{before}{start}\n{found}\n\n{end}{rest.partition(end)[2]}")


def replace_rows(case: Case, tables: dict[str, list[dict[str, Any]]]) -> None:
    """Put some rows in place of those of the same methods in the document."""
    text = DOCUMENT.read_text()
    for config, rows in tables.items():
        start = f"### {case.title}, {config}\n"
        before, _, rest = text.partition(start)
        own, mark, after = rest.partition("\n###")
        if not mark:
            own, mark, after = rest.partition("\n<!-- end")
        fresh = {line.split(" | ")[0]: line for line in table(rows).splitlines()[4:]}
        lines = [fresh.get(line.split(" | ")[0], line) for line in own.split("\n")]
        text = before + start + "\n".join(lines) + mark + after
    DOCUMENT.write_text(text)


def main(*given: str) -> None:
    logging.disable(logging.WARNING)
    one_thread()
    wanted = [name for name in given if not name.startswith("--")]
    only = next((name.partition("=")[2] for name in given if name.startswith("--config=")), "")
    chosen = next((name.partition("=")[2] for name in given if name.startswith("--methods=")), "")
    rows = [name for name in chosen.split(";") if name]
    found: dict[str, Any] = {}
    for make in CASES:
        if wanted and make.__name__ not in wanted:
            continue
        try:
            case = make()
        except pytest.skip.Exception as reason:
            print(f"skipped {make.__name__}: {reason}", file=sys.stderr)
            continue
        configs = [config for config in case.configs if only in ("", config)]
        tables = {
            config: measured(case, config, rows) for config in configs if not rows or {*rows} & {*methods(case, config)}
        }
        found[make.__name__] = tables
        if "--write" in given and rows:
            replace_rows(case, tables)
        elif "--write" in given and not only:
            write(case, make.__name__, tables)
    print(json.dumps({"benchmark": "ptq_tables", **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
