"""What do plain numbers look like as the pages that they name?"""

from baton.ids import PageId


def page_ids(*numbers: int) -> tuple[PageId, ...]:
    return tuple(map(PageId, numbers))
