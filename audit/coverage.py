"""What a verification answers: the first bad record, what the rest covers, and one sentence that claims no more."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """The first bad record."""

    file: str
    line: int
    sequence: int
    problem: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: record {self.sequence}: {self.problem}"


@dataclass(slots=True, kw_only=True)
class Coverage:
    """What the verified records cover (RULINGS 9.9)."""

    first: int = 0
    last: int = 0
    records: int = 0
    segments: int = 0
    nodes: list[str] = field(default_factory=list)
    since: str = ""
    until: str = ""
    starts: int = 0
    stops: int = 0
    lost: int = 0
    recoveries: int = 0
    torn_bytes: int = 0
    suspect_segments: int = 0
    clock_jumps: int = 0
    tunnels_uninspected: int = 0
    observed_passes: int = 0
    refusals_counted: int = 0
    open_intents: int = 0
    kernel_drops: int = 0
    checkpoints: int = 0
    signed_up_to: int = 0
    anchors: int = 0
    anchored_up_to: int = 0
    head: str = ""


@dataclass(slots=True, kw_only=True)
class Report:
    """The whole answer. `bad` is None when everything that was checked holds."""

    bad: Bad | None = None
    coverage: Coverage = field(default_factory=Coverage)
    notes: list[str] = field(default_factory=list)

    @property
    def statement(self) -> str:
        """The one sentence that an auditor may quote."""
        seen = self.coverage
        if self.bad is not None:
            return f"DAMAGED at record {self.bad.sequence}: {self.bad.problem}"
        span = f"{seen.records} records ({seen.first} to {seen.last})"
        after = f"what followed record {seen.last} cannot be excluded"
        if seen.anchored_up_to:
            proof = f"match the anchor at record {seen.anchored_up_to}"
            if seen.anchored_up_to == seen.last:
                return f"{span} {proof}; nothing up to the anchor is missing or changed"
            return f"{span} {proof} and are chained to it; {after}"
        if seen.signed_up_to:
            span = f"{span} are chained, signed up to record {seen.signed_up_to}"
        else:
            span = f"{span} are chained"
        return f"{span}; complete up to record {seen.last}; {after}"


def as_text(report: Report) -> str:
    """The report for a terminal; the statement comes first."""
    seen = report.coverage
    lines = [report.statement]
    if report.bad is not None:
        lines.append(f"first bad record: {report.bad}")
    lines += [
        f"nodes: {', '.join(seen.nodes) or 'none'}; {seen.segments} segments, from {seen.since} to {seen.until}",
        f"processes: {seen.starts} starts, {seen.stops} stops, {seen.lost} lost; log taken up after a kill: "
        f"{seen.recoveries} ({seen.torn_bytes} bytes unfinished); failed writes: {seen.suspect_segments}; "
        f"clock jumps: {seen.clock_jumps}",
        f"not seen in full: {seen.tunnels_uninspected} tunnels as bytes only, {seen.refusals_counted} refusals only "
        f"counted, {seen.observed_passes} observed passes, {seen.kernel_drops} kernel drops; "
        f"{seen.open_intents} intents without an outcome",
        f"checkpoints that hold: {seen.checkpoints}; anchors that match: {seen.anchors}",
        f"head: {seen.head}",
        *(f"note: {note}" for note in report.notes),
    ]
    return "\n".join(lines) + "\n"
