"""Tests of how many pages fit, and of page sizes that an engine can have."""

import pytest

from baton.inference.kv_memory import NotEnoughMemory, check_page_tokens, pages_that_fit
from baton.pages.layout import full_group
from baton.runtime.errors import StartupError

GROUP = full_group("float32", 16, (0, 1), (0,), 8)


def test_pages_fill_the_memory_and_no_more() -> None:
    assert pages_that_fit(GROUP, 3 * GROUP.page_bytes + 5) == 3
    with pytest.raises(NotEnoughMemory, match="holds 3 pages of 16 tokens, and 4 are needed at least"):
        pages_that_fit(GROUP, 4 * GROUP.page_bytes - 1, tokens_min=49)


def test_a_page_size_that_the_engine_has_not_is_refused_with_those_it_has() -> None:
    check_page_tokens(32, range(32, 129, 32), "vllm")
    with pytest.raises(StartupError, match=r"^--page-tokens 16: .* has pages of 32, 64 tokens here"):
        check_page_tokens(16, (64, 32), "vllm")
