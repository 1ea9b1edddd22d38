"""Things that take long to start, shared by tests without sharing their failures.

    @pytest.fixture(scope="package")
    def stacks(demo_model_dir: Path) -> Iterator[Shared[Stack]]:
        with Shared(running_stack, str(demo_model_dir)) as shared:
            yield shared

    @pytest.fixture
    def stack(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
        return stacks.lend(request.node)

Each test leaves what it is lent as it found it. After one that failed nobody knows that, and the next gets
another that is made anew.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar

import pytest

Thing = TypeVar("Thing")
Result = TypeVar("Result")
How = ParamSpec("How")

FAILED: Final = pytest.StashKey[bool]()
"""Key of tests of which a phase failed."""
STARTS_MAX: Final = 2
"""Failed starts in a row after which a shared thing is not started again for a third test."""


class Shared(Generic[Thing]):
    """A thing that tests share one after the other. It is made when it is first needed."""

    def __init__(
        self, make: Callable[How, AbstractContextManager[Thing]], *args: How.args, **options: How.kwargs
    ) -> None:
        self._make = partial(make, *args, **options)
        self._lent: tuple[AbstractContextManager[Thing], Thing] | None = None
        self._borrower: pytest.Item | None = None
        self._vain: list[Exception] = []
        self._done: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()

    def lend(self, borrower: pytest.Item) -> Thing:
        """Lend the thing to a test until another test asks for it. Raises the error that kept it from
        starting."""
        if self._borrower is not None and self._borrower.stash.get(FAILED, False):
            self._end()
        self._borrower = borrower
        if self._lent is None:
            self._lent = self._begin()
        return self._lent[1]

    def once(self, name: str, do: Callable[[Thing], Result]) -> Result:
        """Return the result of `do`, which runs once with each thing."""
        assert self._lent is not None, "nothing is lent"
        if name not in self._done:
            self._done[name] = do(self._lent[1])
        result: Result = self._done[name]
        return result

    def retire(self) -> None:
        """End the lent thing: the next test gets another."""
        self._end()

    def _begin(self) -> tuple[AbstractContextManager[Thing], Thing]:
        if len(self._vain) == STARTS_MAX:
            raise self._vain[-1]
        manager = self._make()
        try:
            made = manager.__enter__()
        except Exception as error:
            self._vain.append(error)
            raise
        self._vain.clear()
        return manager, made

    def _end(self) -> None:
        lent, self._lent = self._lent, None
        self._done.clear()
        if lent is not None:
            lent[0].__exit__(None, None, None)
