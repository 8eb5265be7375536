"""Remarks on what int32 does to the biases of a sim, derived from its state, so that they hold after every verb."""

from collections.abc import Mapping

from qsdk.core.numerics.bias import bias_remark
from qsdk.core.planning.plan import Plan
from qsdk.core.report import Report
from qsdk.core.sims.state import SimState, StoredReader


def bias_remarks(state: SimState, stored: StoredReader) -> dict[str, str]:
    """Return a remark by site for each bias that int32 clips or rounds to 0, or that widened its weight's scale.

    Args:
        state: of the sim; biases without an encoding yet are left out.
        stored: reads the stored tensors.
    """
    sites = [site for site, decision in state.plan.decisions.items() if decision.bias_of is not None]
    result = {}
    for site, values in stored(sites).items():
        encoding = state.encoding(site)
        remark = "" if encoding is None else bias_remark(values, encoding)
        if remark:
            result[site] = remark
    return result


def with_reasons(coverage: Report, remarks: Mapping[str, str]) -> Report:
    """Return a coverage report with the remarks added to the reasons."""
    rows = [
        {**row, "reason": f"{row['reason']}; {remarks[row['site']]}"} if row["site"] in remarks else row
        for row in coverage.rows
    ]
    return Report(coverage.title, rows, coverage.summary)


def with_left_float(report: Report, coarse: Mapping[str, str]) -> Report:
    """Return a report of calibration in which sites left float have no range, but the reason as `note`."""
    rows = [row for row in report.rows if row["site"] not in coarse]
    rows += [{"site": site, "dtype": "float32", "note": reason} for site, reason in coarse.items()]
    return Report(report.title, rows, {**report.summary, "left_float": len(coarse)})


def with_erased(report: Report, plan: Plan, remarks: Mapping[str, str]) -> Report:
    """Return a report of calibration with a note at each site whose grid erases a part of it."""
    specs = {site: plan.decisions[site].spec for site in remarks if all(row["site"] != site for row in report.rows)}
    rows = [{**row, "note": remarks[row["site"]]} if row["site"] in remarks else row for row in report.rows]
    rows += [{"site": site, "dtype": str(spec and spec.dtype), "note": remarks[site]} for site, spec in specs.items()]
    return Report(report.title, rows, {**report.summary, **({"erased_parts": len(remarks)} if remarks else {})})


def with_notes(report: Report, remarks: Mapping[str, str]) -> Report:
    """Return a report of calibration or export with the remarks as `note`, in the site's row or in a new one."""
    known = {row["site"] for row in report.rows}
    rows = [{**row, "note": remarks[row["site"]]} if row["site"] in remarks else row for row in report.rows]
    rows += [{"site": site, "dtype": "int32", "note": remark} for site, remark in remarks.items() if site not in known]
    return Report(report.title, rows, {**report.summary, "bias_notes": len(remarks)})
