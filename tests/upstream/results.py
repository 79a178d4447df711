"""The reports of the test runners of four languages, converted to one form, and printed."""

import json
import xml.etree.ElementTree
from dataclasses import dataclass


@dataclass
class Case:
    file: str
    name: str
    #: `passed`, `failed`, `skipped`, or `absent` for a whole file.
    outcome: str
    #: The assertion that failed, or why it did not run.
    message: str = ""


def from_junit(file, report):
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        outcome, message = "passed", ""
        for kind, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            if (found := case.find(kind)) is not None:
                outcome, message = name, found.get("message", "")
        yield Case(file, case.get("name"), outcome, first_line(message))


def from_vitest(file, report):
    outcomes = {"passed": "passed", "failed": "failed"}
    for suite in json.loads(report.read_text())["testResults"]:
        if suite["status"] == "failed" and not suite["assertionResults"]:
            yield Case(file, "", "failed", first_line(suite.get("message", "")))
        for case in suite["assertionResults"]:
            messages = case.get("failureMessages") or [""]
            yield Case(file, case["title"], outcomes.get(case["status"], "skipped"), first_line(messages[0]))


def from_go(text):
    outcomes = {"pass": "passed", "fail": "failed", "skip": "skipped"}
    said = {}
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            event = {"Action": "broken", "Test": None}
        test = event.get("Test")
        if test and event["Action"] == "output":
            said.setdefault(test, []).append(event["Output"])
        elif test and event["Action"] in outcomes:
            yield Case("tests/go", test, outcomes[event["Action"]], go_message(said.get(test, [])))
    if not said:
        raise SystemExit(f"the Go suite did not run:\n{text[-4000:]}")


def go_message(lines):
    """The output of a test besides its name, from the error on if there is one."""
    lines = [line.strip() for line in lines if not line.startswith(("=== ", "--- "))]
    for number, line in enumerate(lines):
        if line.startswith("Error:"):
            return " ".join(lines[number : number + 2])[:400]
    return lines[-1] if lines else ""


def first_line(text):
    return text.strip().splitlines()[0][:400] if text.strip() else ""


def table(cases):
    files = {}
    for case in cases:
        files.setdefault(case.file, []).append(case.outcome)
    lines = ["| suite | passed | failed | skipped |", "|---|---|---|---|"]
    for file, outcomes in files.items():
        if outcomes == ["absent"]:
            lines.append(f"| {file} | not in this checkout | | |")
            continue
        counts = [outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")]
        lines.append(f"| {file} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def failures(cases, reason):
    lines = []
    for case in cases:
        if case.outcome in ("failed", "skipped"):
            why = reason(case) if case.outcome == "failed" else "the suite skips it"
            lines.append(f"- {case.outcome}: {case.file} {case.name}: {case.message} ({why or 'NOT EXPECTED'})")
    return "\n".join(lines)
