"""FlashAttention kernels that read keys and values in their pages, on a GPU.

They are called by torch's interface, if the package for this GPU is installed. They are used if their results
agree with attention that copies keys and values out of the pages first.
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
"""Torch's name of the FlashAttention kernels that read pages, by the GPU's major compute capability."""
EVERYTHING: Final = (-1, -1)
NOTHING_LATER: Final = (-1, 0)
TOLERANCE: Final = 0.03
"""Largest relative difference of a token's attention result that is accepted in the check of a kernel.

Both computations round to bfloat16.
"""
LONG: Final = 4096
"""Length in tokens of the longest sequences with which a kernel is checked."""
SPAN_MAX: Final = 1000
"""Most tokens of an attention window in the check of a kernel, so that longer sequences exceed it."""
SPANS: Final = ((0, 1), (16, 17), (LONG - 1, LONG), (0, 21), (5, 23), (LONG - 40, LONG))
"""Positions [start, stop) of the tokens that each test row computes in the check of a kernel."""


def find_kernel(device: torch.device, dtype: str) -> PagedKernel | None:
    """Return the attention kernel that is installed for this GPU. If there is none, log the reason and return
    None.

    It also makes torch use the kernel's package for attention that does not read pages.
    """
    why = missing(device, dtype)
    if why:
        log.info(FETCHED, why=why)
        return None
    try:
        activate_flash_attention_impl(KERNELS[torch.cuda.get_device_capability(device)[0]])
    except Exception as error:  # an incompatible package may raise anything
        log.info(FETCHED, why=describe_error(error))
        return None
    return flash_attention


def flash_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PagedRows, attention: LayerAttention
) -> torch.Tensor:
    """Attend to keys and values in pages with the installed FlashAttention package.

    Arguments and result are those of `PagedKernel`.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # its import takes a second

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
    # Share of attention that goes to tokens and not to the sink: [query heads, T].
    shares = torch.sigmoid(logarithms - attention.sinks.float()[:, None])
    return (answer * shares.t()[:, :, None]).to(answer.dtype)


def verified_kernel(
    kernel: PagedKernel,
    query_heads: int,
    cache: PagedKvCache,
    attentions: Mapping[int, LayerAttention] | None = None,
) -> PagedKernel | None:
    """Return `kernel` if its results agree with attention over keys and values copied from the pages.

    If not, log the reason and return None. `query_heads`: number of query heads on this rank. `attentions`:
    attention options by layer id. Overwrites the cache: call it before any page is in use.
    """
    try:
        with torch.inference_mode():
            cache.tensor.normal_()
            worst = max(_worst(kernel, query_heads, cache, each) for each in _kinds(cache, attentions or {}))
            cache.tensor.zero_()
        why = "" if worst <= TOLERANCE else f"a kernel's answers differ by {worst:.2g} of their length"
    except UnsupportedAttention as error:
        why = f"no kernel that reads them looks {error}"
    except Exception as error:  # the package may raise anything
        why = describe_error(error)
    if why:
        log.warning(FETCHED, why=why)
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
        return None
    log.info("keys and values are looked at in their pages")
    return kernel


def _kinds(cache: PagedKvCache, attentions: Mapping[int, LayerAttention]) -> list[LayerAttention]:
    """Return the distinct kinds of attention among the layers, with which a kernel has to be checked.

    Attention spans are narrowed to the sequence lengths that the check uses.
    """
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
    """Return the reason why `device` has no kernel that reads pages, for the number format `dtype`.

    Empty if it may have one.
    """
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
    """Return the largest relative difference between a token's attention result by `kernel` and without it.

    NaN if a result is not finite.
    """
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
    """Return a test row for each entry of `SPANS` for which the cache has enough pages.

    Each row's pages are scattered over the cache.
    """
    size = cache.group.page_tokens
    spans = SPANS[: cache.pages]
    pages = cache.pages // len(spans)
    rows = []
    for index, (start, stop) in enumerate(spans):
        end = min(stop, pages * size)
        table = range(index, len(spans) * pages, len(spans))[::-1]
        sequence = Sequence(Request("proof", (0,) * end, max_tokens=1), [])
        rows.append(Row(sequence, max(0, end - (stop - start)), end, (table,), sample=False))
    return rows
