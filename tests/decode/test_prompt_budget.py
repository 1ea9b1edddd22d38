"""Tests of the prompt tokens that a process of both sides may prefill in one step while it decodes."""

from tests.decode.bench import decoding
from tests.decode.test_growth import asked, running

CHUNK = 512
GAP_MS = 20


async def test_while_nobody_runs_here_a_step_is_as_long_as_ever() -> None:
    async with decoding(pages=16, local_gap_ms=GAP_MS) as bench:
        prompt_budget = bench.work.prompt_budget
        assert prompt_budget.chunk_tokens(CHUNK) == CHUNK
        await running(bench, asked(1, 1, max_tokens=2))
        await bench.settle()
        assert prompt_budget.chunk_tokens(CHUNK) == CHUNK
        bench.assert_empty()


async def test_whoever_runs_here_is_held_up_as_long_as_by_a_prompt_of_its_own_side() -> None:
    async with decoding(pages=16, local_gap_ms=GAP_MS) as bench:
        prompt_budget = bench.work.prompt_budget
        for _ in range(50):
            prompt_budget.stepped(100, 200.0)  # two milliseconds for a token
        bench.engine.hold()
        await running(bench, asked(1, 1))
        pace = bench.work.scheduler.pace
        assert prompt_budget.chunk_tokens(CHUNK) == max(GAP_MS // 2, pace.least_tokens), "a step of its own"
        assert prompt_budget.chunk_tokens(1) == 1
        bench.engine.go()
        await bench.settle()
        assert prompt_budget.chunk_tokens(CHUNK) == CHUNK
        bench.assert_empty()
