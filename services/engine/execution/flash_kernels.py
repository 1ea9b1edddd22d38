"""Can tokens on a GPU look at their pages where those lie?

FlashAttention's kernels can, by torch's interface to them, where the package for this GPU is installed. They
are used where they are seen to give what the other way gives, by which keys and values are fetched from their
pages first.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from baton.engine.execution.attention_span import AttentionSpan, LayerAttention
from baton.engine.execution.paged_attention import PagedAttention
from baton.engine.execution.paged_rows import PagedKernel, PagedRows, UnsupportedAttention
from baton.engine.execution.step_plan import make_plan
from baton.engine.kv_cache import PagedKvCache
from baton.engine_interface import Row, Sequence
from baton.rooms.request import Request
from baton.runtime.errors import describe_error
from baton.runtime.logging import Log

log = Log(__name__)

FETCHED: Final = "keys and values are fetched from their pages"
KERNELS: Final = {9: "FA3", 10: "FA4"}
"""What torch calls those that read pages, by the first number of a GPU's compute capability."""
EVERYTHING: Final = (-1, -1)
NOTHING_LATER: Final = (-1, 0)
TOLERANCE: Final = 0.03
"""Of the difference's length, as a share of an answer's, token by token: both ways round to bfloat16."""
LONG: Final = 4096
"""Tokens of the longest sequences that are tried."""
SPAN_MAX: Final = 1000
"""Tokens of the widest windows that are tried: longer sequences are past their borders."""
SPANS: Final = ((0, 1), (16, 17), (LONG - 1, LONG), (0, 21), (5, 23), (LONG - 40, LONG))
"""Which tokens of their sequences the rows have that are tried."""


def find_kernel(device: torch.device, dtype: str) -> PagedKernel | None:
    """What is installed for this GPU; None, and a line of the log says why, where nothing is. From then on
    torch's attention to what does not lie in pages is the package's, too."""
    why = missing(device, dtype)
    if why:
        log.info(FETCHED, why=why)
        return None
    try:
        activate_flash_attention_impl(KERNELS[torch.cuda.get_device_capability(device)[0]])
    except Exception as error:  # of a package that is not as torch expects it, whatever that raises
        log.info(FETCHED, why=describe_error(error))
        return None
    return flash_attention


def flash_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PagedRows, attention: LayerAttention
) -> torch.Tensor:
    """As `PagedKernel`, by the package that torch was told of."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # takes a second, and only GPUs need it

    if attention.softcap is not None:
        raise UnsupportedAttention("at scores that are bounded")
    span, longest = attention.span, rows.tables.shape[1] * keys.shape[1]
    bound = span is not None and span.binds(longest)
    if span is not None and bound and span.in_chunks:
        raise UnsupportedAttention("at chunks of a sequence")
    # A sequence's last token needs no mask, and without one its query heads can be rows of one product.
    window = EVERYTHING if rows.longest == 1 else NOTHING_LATER
    seen = varlen_attn(
        query,
        keys,
        values,
        rows.begins,
        None,
        rows.longest,
        longest,
        return_aux=None if attention.sinks is None else AuxRequest(lse=True),
        scale=attention.scaling,
        window_size=(span.tokens - 1, 0) if span is not None and bound else window,
        enable_gqa=True,
        seqused_k=rows.stops,
        block_table=rows.tables,
    )
    if attention.sinks is None:
        if isinstance(seen, tuple):
            raise TypeError("more than was asked for")
        return seen
    answer, logarithms = seen
    # What goes to nothing is taken from what goes to the tokens: [query heads, T].
    shares = torch.sigmoid(logarithms - attention.sinks.float()[:, None])
    return (answer * shares.t()[:, :, None]).to(answer.dtype)


def proven(
    kernel: PagedKernel,
    query_heads: int,
    cache: PagedKvCache,
    attentions: Mapping[int, LayerAttention] | None = None,
) -> PagedKernel | None:
    """`kernel`, where so many heads see by it what they see without, as each layer of `attentions` looks;
    else None, and a line of the log says why. The cache's contents are lost: before any page is in use."""
    try:
        with torch.inference_mode():
            cache.tensor.normal_()
            worst = max(_worst(kernel, query_heads, cache, each) for each in _kinds(cache, attentions or {}))
            cache.tensor.zero_()
        why = "" if worst <= TOLERANCE else f"a kernel's answers differ by {worst:.2g} of their length"
    except UnsupportedAttention as error:
        why = f"no kernel that reads them looks {error}"
    except Exception as error:  # as above
        why = describe_error(error)
    if why:
        log.warning(FETCHED, why=why)
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
        return None
    log.info("keys and values are looked at in their pages")
    return kernel


def _kinds(cache: PagedKvCache, attentions: Mapping[int, LayerAttention]) -> list[LayerAttention]:
    """Each way in which a layer looks, over no more tokens than are tried: one of each span, with and
    without the rest."""
    plain = LayerAttention(cache.head_dim**-0.5)
    found: dict[tuple[AttentionSpan | None, float | None, bool], LayerAttention] = {
        (None, None, False): plain
    }
    for attention in attentions.values():
        span = None if attention.span is None else attention.span.narrowed(SPAN_MAX)
        kind = (span, attention.softcap, attention.sinks is not None)
        found.setdefault(kind, replace(attention, span=span))
    return [*found.values()]


def missing(device: torch.device, dtype: str) -> str:
    """Why there can be no kernel; nothing where there may be one."""
    if dtype != "bfloat16":
        return f"kernels that read pages compute in bfloat16, not in {dtype}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in KERNELS:
        return f"GPUs of compute capability {major}.{minor} have no kernel that reads them"
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"torch {torch.__version__} has no interface to kernels that read them"
    return ""


def _worst(kernel: PagedKernel, query_heads: int, cache: PagedKvCache, attention: LayerAttention) -> float:
    """By how much one token's answer differs; NaN where one is not a number."""
    heads, rows = len(cache.group.heads), _rows(cache)
    tokens = sum(row.stop - row.start for row in rows)
    query = cache.tensor.new_empty(tokens, query_heads, cache.head_dim).normal_()
    entries = cache.tensor.new_empty(tokens, cache.planes * heads, cache.head_dim).normal_()
    answers = []
    for each in (kernel, None):
        plan = make_plan(rows, cache, cache.tensor.device, kernel=each)
        step = PagedAttention(plan, cache, {})
        answers.append(step.attend(cache.group.layers[-1], query, entries, attention).float().flatten(1))
    seen, right = answers
    return float(((seen - right).norm(dim=1) / right.norm(dim=1)).max())


def _rows(cache: PagedKvCache) -> list[Row]:
    """One for each of `SPANS`, as far as the cache has pages for them, which lie in no order."""
    size = cache.group.page_tokens
    spans = SPANS[: cache.pages]
    pages = cache.pages // len(spans)
    rows = []
    for place, (start, stop) in enumerate(spans):
        end = min(stop, pages * size)
        table = range(place, len(spans) * pages, len(spans))[::-1]
        sequence = Sequence(Request("proof", (0,) * end, max_tokens=1), [])
        rows.append(Row(sequence, max(0, end - (stop - start)), end, (table,), sample=False))
    return rows
