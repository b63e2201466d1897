"""What a plan found: one record a fact, collected and never raised one by one.

A finding says what was asked, what was found, where it came from and what to do. Errors stop a load;
notes do not, they explain a choice. `PlanError` carries the errors of one plan, all at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Severity: TypeAlias = Literal["error", "note"]

FindingCode: TypeAlias = Literal[
    "missing",  # a parameter of the model that no tensor fills
    "unexpected",  # a tensor of the checkpoint that no rule uses or drops
    "duplicate",  # two stored spellings of one parameter
    "collision",  # one stored tensor claimed by two parameters
    "shape",  # the header's shape is not the expected one
    "dtype",  # the header's dtype is not one that the layout takes
    "layout",  # no alternative of a scheme fits the headers, or two do
    "cut",  # a rank's piece cannot be cut out of the stored tensor
    "heads",  # attention heads do not go out over the ranks
    "refined",  # a scale grid is refined so that a rank boundary falls on an edge
    "not-fused",  # parts of one node stay apart
    "padded",  # a vocabulary is padded so that it divides
    "untied",  # a head is stored although the config ties it
    "unused-pattern",  # an ignore or target pattern that matched nothing
    "unread-key",  # a quantization key that nobody reads
    "plain-file",  # the config says quantized, the file is plain
    "kernel",  # no kernel backend serves a node
    "not-installed",  # a chosen backend serves the target but is not installed here
    "plugin",  # an installed plugin that could not be used
    "config",  # a value of the model's config that cannot be met
]

CODES: tuple[str, ...] = get_args(FindingCode)
LISTED = 10  # names printed of a long list; the whole list stays on the findings


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about a plan.

    Attributes:
        code: What kind of fact (a member of `FindingCode`).
        severity: ``error`` stops the load, ``note`` explains.
        subject: The tensor, parameter, node or pattern that it is about, whole.
        text: The sentence for the user: asked, found, where from, what to do.
    """

    code: FindingCode
    severity: Severity
    subject: str
    text: str

    def to_json(self) -> dict[str, str]:
        """Return the finding as plain data."""
        return {
            "code": self.code,
            "severity": self.severity,
            "subject": self.subject,
            "text": self.text,
        }


def errors_of(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that stop a load, in their order."""
    return tuple(finding for finding in findings if finding.severity == "error")


def summarize(findings: Iterable[Finding]) -> list[str]:
    """Return printable lines: counts a code, and at most `LISTED` sentences of each.

    >>> summarize([Finding("missing", "error", "a", "missing tensor a")])
    ['missing tensor a']
    """
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.code, []).append(finding)
    lines: list[str] = []
    for code, group in groups.items():
        if len(group) > LISTED:
            lines.append(f"{len(group)} findings of kind {code}, the first {LISTED}:")
        lines.extend(finding.text for finding in group[:LISTED])
    return lines
