"""A conversion of plain numbers into page ids, for tests."""

from baton.ids import PageId


def page_ids(*numbers: int) -> tuple[PageId, ...]:
    return tuple(map(PageId, numbers))
