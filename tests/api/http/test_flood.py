"""Many long texts at once neither take a server's memory for good nor disturb other callers."""

from tests.api.flooded import flood

TEXTS, BYTES = 6, 512 * 2**10
"""Number and size of texts. Each takes about 165 MiB while it is tokenised."""
MIB = 1024


def test_long_texts_at_once_take_the_memory_of_one_and_give_it_back() -> None:
    seen = flood(TEXTS, BYTES)
    assert sum(seen.statuses.values()) == TEXTS
    assert set(seen.statuses) <= {"200", "429"}
    assert set(seen.others) == {"200"}
    assert seen.most_kib - seen.before_kib < 256 * MIB, "two at once would take more"
    assert seen.after_kib - seen.before_kib < 100 * MIB
