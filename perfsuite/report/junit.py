"""JUnit XML: one test case for each workload, with a failure or an error if the verdict is not green."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from perfsuite.report import units
from perfsuite.report.files import write as write_text
from perfsuite.report.model import RunReport, rows
from perfsuite.report.workload_rows import Row


def document(report: RunReport) -> str:
    """Return the report as JUnit XML text."""
    root = ElementTree.Element("testsuites", name="perfsuite")
    counts = report.correctness
    if counts.passed or counts.failed or counts.skipped:
        _suite(root, "correctness", _correctness(report), report, passed=counts.passed, skipped=counts.skipped)
    _suite(root, "speed", [_workload(report, r) for r in rows(report)], report)
    run = [_problem(n, problem) for n, problem in enumerate(report.problems, 1)]
    if not report.complete:
        run.append(_problem(len(run) + 1, "interrupted: this report holds what was measured until then"))
    if run:
        _suite(root, "run", run, report)
    ElementTree.indent(root)
    return f"<?xml version='1.0' encoding='utf-8'?>\n{ElementTree.tostring(root, encoding='unicode')}\n"


def write(report: RunReport, path: Path) -> Path:
    """Write the report to `path`."""
    return write_text(path, document(report))


def _suite(
    root: ElementTree.Element, name: str, cases: list[ElementTree.Element], report: RunReport, **counts: int
) -> None:
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=f"perfsuite.{name}",
        tests=str(len(cases)),
        failures=str(sum(case.find("failure") is not None for case in cases)),
        errors=str(sum(case.find("error") is not None for case in cases)),
        skipped="0",
        timestamp=report.started,
        time=f"{sum(float(case.get('time', 0)) for case in cases):.3f}",
        hostname=clean(report.machine.device),
    )
    properties = ElementTree.SubElement(suite, "properties")
    facts = {key: getattr(report.machine, key) for key in ("device_name", "driver", "cuda", "torch", "triton")}
    for key, value in {**facts, "revision": report.revision, **counts}.items():
        if value is not None:
            ElementTree.SubElement(properties, "property", name=key, value=clean(str(value)))
    suite.extend(cases)


def _correctness(report: RunReport) -> list[ElementTree.Element]:
    # Failed items only: pytest's own --junitxml lists every item.
    cases = []
    for item, why in report.correctness.failures.items():
        case = ElementTree.Element("testcase", classname=clean(item.partition("::")[0]), name=clean(item), time="0")
        ElementTree.SubElement(case, "failure", message=clean(why), type="correctness")
        cases.append(case)
    return cases


def _workload(report: RunReport, r: Row) -> ElementTree.Element:
    spent = sum(m.seconds for m in report.measurements.get(r.id, ()))
    case = ElementTree.Element(
        "testcase", classname=clean(r.technique.replace("/", ".")), name=clean(r.workload), time=f"{spent:.3f}"
    )
    case.set("file", clean(r.id.partition("::")[0]))
    if r.status is not None and not r.status.green:
        kind = "failure" if r.status.blames_code else "error"  # nothing was decided about the code
        ElementTree.SubElement(case, kind, message=clean(r.message), type=r.status.value).text = clean(r.id)
    ElementTree.SubElement(case, "system-out").text = clean(_figures(r))
    return case


def _figures(r: Row) -> str:
    parts = [f"reference {r.reference}", f"optimized {units.seconds(r.optimized_s)}"]
    if r.speedup:
        parts.append(f"speedup {r.times_as_fast} {units.interval(r.speedup.low, r.speedup.high)}".strip())
    if r.rival:
        parts.append(f"best rival {r.rival} {units.seconds(r.rival_s)}")
    if r.loses:
        parts.append(r.loses)
    if r.limit_fraction is not None:
        parts.append(f"{units.percent(r.limit_fraction)} of the {r.limit_by} limit")
    if r.status is not None and r.message:
        parts.append(f"{r.status.value}: {r.message}")
    return "; ".join(parts)


def _problem(number: int, message: str) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname="perfsuite", name=f"run problem {number}", time="0")
    ElementTree.SubElement(case, "error", message=clean(message), type="run")
    return case


def clean(text: str) -> str:
    """Return the text without terminal colour codes, and with � for each character that XML 1.0 does not allow."""
    return re.sub("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", re.sub(r"\x1b\[[0-9;]*m", "", text))
