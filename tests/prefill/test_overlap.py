"""Tests of the measure of transfer time that overlapped with steps."""

from baton.prefill.overlap import Overlap


def test_what_goes_on_between_two_looks_counts_and_what_rests_does_not() -> None:
    overlap = Overlap()
    overlap.looked(10, 12, goes_on=True, beside=True)
    overlap.looked(20, 21, goes_on=False, beside=True)
    assert (overlap.spent_us, overlap.hidden_us) == (11, 11)
    overlap.looked(50, 53, goes_on=False, beside=False)
    assert (overlap.spent_us, overlap.hidden_us) == (14, 11)
    assert overlap.summary == "0 bytes in 14 us, 11 us of them beside steps"
