"""Tests of how test files are shared out."""

from tests.suite.order import unit_of


def test_what_is_handed_out_at_once_is_a_file_or_a_folder_that_shares_a_stack() -> None:
    assert unit_of("tests/launch/test_fork_server.py::test_x[a::b]") == "tests/launch/test_fork_server.py"
    assert unit_of("tests/process/one_stack/test_load.py::test_x") == "tests/process/one_stack/"
