"""Check of the rows of a step, before anything is computed."""

from collections.abc import Sequence

from baton.engine_interface import Row
from baton.pages.layout import KvGroup


def check_row(row: Row, groups: Sequence[KvGroup], pages: Sequence[int], context_length: int) -> None:
    """Raise ValueError if an engine cannot compute `row`. The text names the request and the numbers.

    `pages`: number of pages in the engine's memory, by KV group.
    """
    known = row.sequence.length
    name = row.sequence.request.request_id
    if not 0 <= row.start < row.stop <= known:
        raise ValueError(f"{name}: positions [{row.start}, {row.stop}) of a sequence of {known} tokens")
    if row.end > context_length:
        raise ValueError(f"{name}: position {row.end - 1} in a model of {context_length} positions")
    if row.sample and row.stop != known:
        raise ValueError(f"{name}: token {row.stop} is known already and cannot be drawn")
    if row.drafts and not row.sample:
        raise ValueError(f"{name}: {len(row.drafts)} drafts of a row that draws nothing")
    if row.drafts and row.scored:
        raise ValueError(f"{name}: {len(row.drafts)} drafts of a row whose prompt is scored")
    scores, prompt = row.sequence.scores, len(row.sequence.request.prompt)
    if scores is not None and len(scores.values) < min(row.start, prompt - 1):
        raise ValueError(f"{name}: scores behind position {row.start}, and {len(scores.values)} before it")
    if row.drafts and any(group.is_state for group in groups):
        raise ValueError(f"{name}: {len(row.drafts)} drafts of a model with states")
    for group, table, count in zip(groups, row.tables, pages, strict=True):
        needed = group.pages_for(row.end)
        if len(table) < needed:
            raise ValueError(f"{name}: {row.end} tokens need {needed} pages, the table has {len(table)}")
        for page in table[:needed]:
            if not 0 <= page < count:
                raise ValueError(f"{name}: page {page} of a cache of {count} pages")
