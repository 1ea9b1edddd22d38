"""Options that several kinds of tests share."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write golden stories and diagrams anew, for review"
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be regenerated instead of compared."""
    return bool(request.config.getoption("--rewrite"))
