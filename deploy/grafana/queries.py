"""How is Prometheus asked for what a panel shows?

Targets are known by `baton_build_info`, whatever the scrape configuration calls them.
"""

from typing import Final

HERE: Final = 'namespace=~"$namespace"'
TARGETS: Final = "on (namespace, job, instance)"


def now(metric: str, **labels: str) -> str:
    """A metric's series. A label's value may begin with the operator: `~`, `!` or `!~`."""
    return f"{metric}{{{', '.join([HERE, *(_matched(name, value) for name, value in labels.items())])}}}"


def _matched(name: str, value: str) -> str:
    for operator in ("!~", "!", "~"):
        if value.startswith(operator):
            equals = {"!~": "!~", "!": "!=", "~": "=~"}[operator]
            return f'{name}{equals}"{value.removeprefix(operator)}"'
    return f'{name}="{value}"'


def per_second(metric: str, **labels: str) -> str:
    return f"rate({now(metric, **labels)}[$__rate_interval])"


def of(role: str, expression: str, rank: str = "~.*") -> str:
    """Of one role's processes alone, with their names."""
    info = now("baton_build_info", role=f"~{role}", worker="~$worker", rank=rank)
    return f"{expression} * {TARGETS} group_left (role, worker, rank) {info}"


def led(role: str, expression: str) -> str:
    """Of whoever leads a worker: its ranks hold the same rooms, and are not to be added."""
    return of(role, expression, rank="0")


def mean(metric: str, role: str = "", **labels: str) -> str:
    parts = [per_second(f"{metric}_{part}", **labels) for part in ("sum", "count")]
    total, count = (f"sum({of(role, part) if role else part})" for part in parts)
    return f"{total} / {count}"


def quantile(share: float, metric: str, by: str = "", role: str = "") -> str:
    rate = per_second(f"{metric}_bucket")
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({share}, sum by ({labels}) ({of(role, rate) if role else rate}))"


def or_zero(quantiles: str) -> str:
    """Of nothing there is no quantile: 0 in its place."""
    return f"({quantiles} >= 0) or vector(0)"


def total(role: str, expression: str) -> str:
    """Over the workers of a role."""
    return f"sum({led(role, expression)})"
