"""What to add to a config so that weights get the dtype and the scales that an encodings file has for them."""

from collections.abc import Collection, Mapping

from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec, axis_of, block_size_of
from qsdk.core.planning.plan import Plan
from qsdk.core.site import owner_of


def as_in_file(plan: Plan, encodings: Mapping[str, Encoding], sites: Collection[str]) -> str:
    """Return the overrides that give weights the form that a file has for them, "" where there is none.

    Args:
        plan: of the sim.
        encodings: of the file, by site.
        sites: of which the file says something else than the plan.
    """
    weights = {site: decision for site, decision in plan.decisions.items() if decision.kind == "weight"}
    options = {
        site: _options(decision.spec, encodings[site])
        for site, decision in weights.items()
        if site in sites and site in encodings and decision.spec is not None
    }
    result: dict[str, None] = {}
    for site, wanted in options.items():
        op_type = weights[site].op_type
        alike = [other for other, decision in weights.items() if decision.op_type == op_type]
        whole = len(alike) > 1 and all(options.get(other) == wanted for other in alike)
        if wanted:
            pattern = f'"*", op_type="{op_type}"' if whole else f'"{owner_of(site)}"'
            result[f".override({pattern}, {wanted})"] = None
    return "".join(result)


def _options(spec: Spec, given: Encoding) -> str:
    result = []
    if given.dtype != spec.dtype:
        result.append(f'weight="{given.dtype}"')
    if given.block_size not in (None, block_size_of(spec.granularity)):
        result.append(f"block_size={given.block_size}")
    elif (given.axis is None) != (axis_of(spec.granularity) is None):
        result.append(f"per_channel={given.axis is not None}")
    if spec.symmetric and not given.symmetric:
        result.append("symmetric_weights=False")
    return ", ".join(result)
