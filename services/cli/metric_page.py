"""Text of docs/metrics.md, which `baton metrics` prints."""

from collections.abc import Sequence
from typing import Final

from baton.cli.metric_catalog import OPEN, QUESTIONS, Exported, exported

HEAD: Final = """\
# Metrics

Made by `baton metrics` from the collectors themselves; a test compares the two. The bootstrap
serves them on its `/metrics`, a worker on its metrics port. Every rank of a group has its own port;
ranks other than the leader choose a free one if none is given. Every series exists from the start
of its process, at 0, so that `rate` and alerts see the first event. At idle gauges return to their
start. Only the bootstrap's two latencies count single tokens.

To tell apart what both sides export, join `baton_build_info`. That works whatever names the scrape
configuration gives to its targets:

```promql
sum by (role, state) (
  baton_kv_pages * on (namespace, job, instance) group_left (role, worker) baton_build_info{rank="0"}
)
```

The ranks of a worker hold the same rooms and pages, each its own part of the bytes: rank 0 stands
for all.

A histogram `x` is the series `x_bucket`, `x_sum` and `x_count`. Rules and alerts are in
`deploy/prometheus`, what to do about an alert in [runbook.md](runbook.md), a dashboard in
`deploy/grafana`.
"""


def metric_page() -> str:
    """Return the text of docs/metrics.md.

    Raises LookupError for a metric that answers no question in QUESTIONS, or a name there that is no metric.
    """
    found: dict[str, list[Exported]] = {}
    for each in exported():
        found.setdefault(each.name, []).append(each)
    named = [name for names in QUESTIONS.values() for name in names]
    if sorted(named) != sorted(found):
        unmatched = sorted(set(named) ^ set(found))
        raise LookupError(f"in the code or among the questions, not in both or not once: {unmatched}")
    parts = [HEAD]
    for question, names in QUESTIONS.items():
        rows = [_row(exports) for name in names for exports in _alike(found[name])]
        table = ["| metric | type | unit | from | labels | meaning |", "|---|---|---|---|---|---|", *rows]
        parts.append(f"## {question}\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


def _alike(exports: Sequence[Exported]) -> list[list[Exported]]:
    """Return the exports of one metric by several services, grouped by equal help text and labels."""
    groups: list[list[Exported]] = []
    for each in exports:
        for group in groups:
            if (group[0].text, group[0].labels) == (each.text, each.labels):
                group.append(each)
                break
        else:
            groups.append([each])
    return groups


def _row(exports: Sequence[Exported]) -> str:
    first = exports[0]
    labels = [f"{label}: {_values(first, label)}" for label in first.labels]
    cells = (
        f"`{first.name}`",
        first.kind,
        first.unit,
        ", ".join(each.role for each in exports),
        "; ".join(labels),
        first.text,
    )
    return f"| {' | '.join(cells)} |"


def _values(metric: Exported, label: str) -> str:
    known = OPEN.get((metric.name, label))
    return known or ", ".join(f"`{value}`" for value in metric.labels[label])
