"""Translation of rows into vLLM's `SchedulerOutput`, and a cache of the requests that its runner knows.

The runner keeps a copy of each request's tokens and blocks. The cache may lose any entry: its sequence then
comes as a new request, which costs a copy of its token ids.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from baton.engine_interface import Row, Sequence
from baton.vllm.memory import NULL_BLOCKS

SAMPLING: Final = SamplingParams(temperature=0.0, max_tokens=1)
"""Never used, since Baton draws, but no request is without."""

NUMBERS: Final = count()
"""Names of requests, which differ in all caches over one runner."""

Blocks = tuple[list[int], ...]
"""Block ids of a request, by KV group."""


@dataclass(slots=True)
class KnownRequest:
    """A request that the runner knows."""

    name: str
    blocks: Blocks
    made_with: int
    """Number of tokens that it was made with."""
    computed: int
    """Number of tokens that were computed, drafts included."""

    def continues_with(self, row: Row, blocks: Blocks) -> bool:
        """Return whether `row` begins where this request ends, over the same blocks and maybe more."""
        return self.made_with <= row.start <= self.computed and all(
            mine == theirs[: len(mine)] for mine, theirs in zip(self.blocks, blocks, strict=True)
        )


class RequestCache:
    """The runner's requests, by sequence. At most `requests_max`, those of the latest steps."""

    def __init__(self, runner: Any, page_tokens: Items[int], requests_max: int) -> None:
        """`runner`: vLLM's model runner. `page_tokens`: tokens of a page, by KV group."""
        self._runner = runner
        self._page_tokens = page_tokens
        self.requests_max = requests_max
        self.known: OrderedDict[Sequence, KnownRequest] = OrderedDict()
        self._released: deque[Sequence] = deque()
        self._finished: set[str] = set()

    def release(self, sequence: Sequence) -> None:
        """Forget the request of a sequence that has ended. From any thread."""
        self._released.append(sequence)

    def forget_all(self, finished: Iterable[str] = ()) -> None:
        """Forget every request, after a step that failed. `finished`: names that this step finished."""
        self._finished.update(finished, (each.name for each in self.known.values()))
        self.known.clear()

    def schedule(self, rows: Items[Row]) -> tuple[SchedulerOutput, list[str]]:
        """Return the step's input for the runner, and the name of each row's request."""
        self._drop()
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        counts: dict[str, int] = {}
        for row in rows:
            blocks = self._blocks(row)
            known = self.known.pop(row.sequence, None)
            if known is not None and known.continues_with(row, blocks):
                request = self._continue(known, row, blocks, cached)
            else:
                self._finished.update([] if known is None else [known.name])
                request = self._make(row, blocks, new)
            self.known[row.sequence] = request
            counts[request.name] = row.end - row.start
        assert len(counts) == len(rows), "two rows of one sequence"
        finished, self._finished = self._finished, set()
        scheduled = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
        )
        return scheduled, list(counts)

    def _drop(self) -> None:
        """Drop the requests of released sequences, and the oldest ones above the limit."""
        while self._released:
            known = self.known.pop(self._released.popleft(), None)
            if known is not None:
                self._finished.add(known.name)
        while len(self.known) > self.requests_max:
            self._finished.add(self.known.popitem(last=False)[1].name)

    def _blocks(self, row: Row) -> Blocks:
        """Return the block ids of the pages that `row` needs, by KV group."""
        return tuple(
            [page + NULL_BLOCKS for page in table[: -(-row.end // size)]]
            for table, size in zip(row.tables, self._page_tokens, strict=True)
        )

    def _make(self, row: Row, blocks: Blocks, new: list[NewRequestData]) -> KnownRequest:
        """Add a new request to `new`, whose first `row.start` tokens are in its pages."""
        name = str(next(NUMBERS))
        tokens = [*row.sequence.tokens(0, row.stop), *row.drafts]
        request = NewRequestData(
            req_id=name,
            prompt_token_ids=tokens,
            mm_features=[],
            sampling_params=SAMPLING,
            pooling_params=None,
            block_ids=tuple(list(each) for each in blocks),
            num_computed_tokens=row.start,
            lora_request=None,
        )
        new.append(request)
        return KnownRequest(name, blocks, len(tokens), row.end)

    def _continue(
        self, known: KnownRequest, row: Row, blocks: Blocks, cached: CachedRequestData
    ) -> KnownRequest:
        """Add the next tokens of a known request to `cached`, and to the runner's copy of them.

        Drafts of an earlier step that were rejected are overwritten.
        """
        batch, state = self._runner.input_batch, self._runner.requests[known.name]
        fed, outputs = list(row.fed), state.output_token_ids
        del outputs[row.start - known.made_with :]
        outputs.extend(fed)
        index = batch.req_id_to_index.get(known.name)
        if index is not None:
            batch.token_ids_cpu[index, row.start : row.end] = fed
            batch.is_token_ids[index, row.start : row.end] = True
            batch.num_tokens_no_spec[index] = row.end
        more = tuple(theirs[len(mine) :] for mine, theirs in zip(known.blocks, blocks, strict=True))
        cached.req_ids.append(known.name)
        cached.new_token_ids.append([])
        cached.new_block_ids.append(more if any(more) else None)
        cached.num_computed_tokens.append(row.start)
        cached.num_output_tokens.append(len(outputs))
        return KnownRequest(known.name, blocks, known.made_with, row.end)
