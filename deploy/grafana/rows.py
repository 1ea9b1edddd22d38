"""Which questions does the dashboard answer, a row each, and what shows the answer?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from deploy.grafana.queries import TARGETS, led, mean, now, of, or_zero, per_second, quantile, total


@dataclass(frozen=True)
class Panel:
    title: str
    text: str
    """What it shows, and what to think of it."""
    queries: Mapping[str, str]
    """By legend."""
    unit: str = "short"
    width: int = 8
    stacked: bool = False
    kind: str = "timeseries"
    most: float | None = None
    """Where its axis ends."""


BOTH: Final = "prefill|decode"
WHO: Final = "{{worker}}/{{rank}}"
REQUESTS: Final = "baton_http_requests_total"
GENERATING: Final = "~/v1/(chat/completions|completions|messages|responses)"

ROWS: Final[Mapping[str, Sequence[Panel]]] = {
    "How is it for clients?": (
        Panel(
            "Ready workers",
            "A side at 0 answers every request with 503.",
            {"{{side}}": f"max by (side) ({now('baton_workers', state='ready')})"},
            kind="stat",
            width=4,
        ),
        Panel(
            "Requests",
            "Answered, refused (the request was wrong, or a queue full), given up by clients that hung up"
            " before their answer began, and failed (before their answer or in it), a second.",
            {
                "answered": f"sum({per_second(REQUESTS, route=GENERATING, status='~2..')})",
                "refused": f"sum({per_second(REQUESTS, route=GENERATING, status='~4[0-8].')})",
                "given up": f"sum({per_second(REQUESTS, route=GENERATING, status='499')})",
                "failed": f"sum({per_second(REQUESTS, route=GENERATING, status='~5..|other')})",
            },
            unit="reqps",
            width=5,
        ),
        Panel(
            "Time to first token",
            "From a request's arrival at the bootstrap to its first token.",
            {
                f"p{share:g}": quantile(share / 100, "baton_time_to_first_token_seconds")
                for share in (50, 95, 99)
            },
            unit="s",
            width=5,
        ),
        Panel(
            "Between two tokens",
            "Of one sequence, as the bootstrap passes them on.",
            {
                f"p{share:g}": quantile(share / 100, "baton_inter_token_latency_seconds")
                for share in (50, 95, 99)
            },
            unit="s",
            width=5,
        ),
        Panel(
            "Tokens a second",
            "Prompt tokens computed (cached ones are not) and tokens drawn by decode.",
            {
                "prompt": total("prefill", per_second("baton_prefill_tokens_total")),
                "output": total("decode", per_second("baton_decode_tokens_total")),
            },
            width=5,
        ),
    ),
    "Which side is the bottleneck?": (
        Panel(
            "Computing",
            "The share of the time in which a step of the model runs. The side that is near 1 while the"
            " other is not is the bottleneck. A decode worker with one sequence is near 1, too: see how"
            " full its batch is.",
            {WHO: of(BOTH, per_second("baton_step_seconds_sum"))},
            unit="percentunit",
            most=1,
        ),
        Panel(
            "Requests by where they wait",
            "What piles up in front of prefill waits for prefill; 'for pages' and 'for the batch' are"
            " decode's.",
            {
                "for a pair of workers": f"sum({now('baton_admission_queue_requests')})",
                "prefill: for a destination": total("prefill", now("baton_prefill_bootstrap_queue_requests")),
                "prefill: to be computed": total("prefill", now("baton_prefill_waiting_queue_requests")),
                "prefill: to be written": total("prefill", now("baton_prefill_inflight_queue_requests")),
                "decode: for pages": total("decode", now("baton_decode_prealloc_queue_requests")),
                "decode: for what is written": total("decode", now("baton_decode_transfer_queue_requests")),
                "decode: for the batch": total("decode", now("baton_decode_waiting_requests")),
            },
            stacked=True,
        ),
        Panel(
            "Requests that wait, by class",
            "For a pair of workers. A class is a request's priority: above is below zero, default is no"
            " priority.",
            {
                "{{class}}": f"sum by (class) ({now('baton_admission_queue_requests')})",
            },
            stacked=True,
        ),
        Panel(
            "Wait for workers, by class",
            "Of a hundred requests that got a pair of workers, the one that waited longest. The classes above"
            " wait least.",
            {"{{class}}": quantile(0.99, "baton_admission_wait_seconds", "class")},
            unit="s",
        ),
        Panel(
            "Places taken",
            "The share of the rooms that ready workers may hold. At 1 the bootstrap queues, for the side"
            " that is there.",
            {
                "{{side}}": f"sum by (side) ({now('baton_worker_places', state='taken')})"
                f" / sum by (side) ({now('baton_worker_places')})"
            },
            unit="percentunit",
            most=1,
        ),
        Panel(
            "KV used, as rooms are placed by it",
            "The share of the caches of ready workers that is used or asked for. Near 1 on decode the"
            " bootstrap queues for memory.",
            {
                "{{side}}": f"sum by (side) ({now('baton_worker_kv_tokens', state='used')})"
                f" / sum by (side) ({now('baton_worker_kv_tokens')})"
            },
            unit="percentunit",
            most=1,
        ),
        Panel(
            "Rooms retracted a minute",
            "Decode needed their pages for older rooms. Nothing failed: their requests go on, and their"
            " clients see a pause. Many of them say that decode has too few pages for those that run.",
            {"retracted": f"60 * sum({per_second('baton_rooms_retracted_total')})"},
        ),
        Panel(
            "Computed again, beside what is passed on",
            "Tokens a second that prefill computes once more for requests whose room was retracted, and"
            " tokens that clients get. If they are near each other, decode retracts too much for its memory.",
            {
                "computed again": f"sum({per_second('baton_retraction_recomputed_tokens_total')})",
                "passed on": f"sum({per_second('baton_inter_token_latency_seconds_count')})",
            },
        ),
        Panel(
            "Paused for pages",
            "From a room's being retracted until its request's next token; 0 while none is.",
            {
                f"p{share:g}": or_zero(quantile(share / 100, "baton_retraction_pause_seconds"))
                for share in (50, 95, 99)
            },
            unit="s",
        ),
    ),
    "Should I add prefill or decode?": (
        Panel(
            "Prefill: prompts waiting, for each worker",
            "Add prefill when this stays above a few, prefill computes all the time, and decode's pages are"
            " not full.",
            {
                "waiting": total("prefill", now("baton_prefill_waiting_queue_requests"))
                + f" / clamp_min(max({now('baton_workers', side='prefill', state='ready')}), 1)"
            },
        ),
        Panel(
            "Decode: batch filled, pages in use",
            "Add decode when pages are in use to nearly 1, or the batch is full. Either makes prefill wait"
            " for destinations.",
            {
                "batch {{worker}}": "sum by (worker) ("
                + of("decode", now("baton_decode_batch_places", state="taken"))
                + ") / sum by (worker) ("
                + of("decode", now("baton_decode_batch_places"))
                + ")",
                "pages {{worker}}/{{rank}}": "1 - sum by (worker, rank) ("
                + of("decode", now("baton_kv_pages", state="~free|cached"))
                + ") / sum by (worker, rank) ("
                + of("decode", now("baton_kv_pages"))
                + ")",
            },
            unit="percentunit",
            most=1,
        ),
        Panel(
            "Time of a step",
            "Mean by worker. Decode steps that grow with the batch are what inter-token latency is made of.",
            {
                WHO: of(
                    BOTH,
                    f"({per_second('baton_step_seconds_sum')} / {per_second('baton_step_seconds_count')})",
                )
            },
            unit="s",
        ),
        Panel(
            "Drafts",
            "Tokens a second that decode checked before they were drawn (`--speculate`). Those that were"
            " taken came without a step of their own; many that were not only make steps longer.",
            {
                outcome: total("decode", per_second("baton_decode_draft_tokens_total", outcome=outcome))
                for outcome in ("taken", "missed")
            },
        ),
    ),
    "Where are prompts computed?": (
        Panel(
            "Prompt tokens, by the side that computed them",
            "The share that each side computed; cached ones are not. Decode computes what it has sooner than"
            " prefill would: short rests, and whatever it has time for while prefill is the queue.",
            {
                "{{side}}": f"sum by (side) ({per_second('baton_prompt_tokens_computed_total')})"
                f" / scalar(sum({per_second('baton_prompt_tokens_computed_total')}))"
            },
            unit="percentunit",
            most=1,
            stacked=True,
        ),
        Panel(
            "Prompts, by the side that computed them and why",
            "A second. Handed over: prefill's own. Sooner: decode had it before prefill would have. Same"
            " process: nothing was to be handed over. No prefill: none was ready, and decode computes all.",
            {"{{why}}": f"sum by (why) ({per_second('baton_prompts_computed_total')})"},
            stacked=True,
        ),
        Panel(
            "Ready workers by their weight",
            "A worker of one side counts as one; a process that serves both sides counts on each by its"
            " weight, which `baton role` changes.",
            {"{{side}}": f"max by (side) ({now('baton_workers_weight')})"},
        ),
    ),
    "Where does the time to the first token go?": (
        Panel(
            "Stages of the first token",
            "Means, one above the other. A pair: no worker has a place. A destination: decode is not"
            " connected yet, or has no pages. Space: prefill has no pages. Computing includes waiting for"
            " other prompts. Rooms that end without a token count in the stages before it, and may leave"
            " nothing for it.",
            {
                "for a pair of workers": mean("baton_admission_wait_seconds"),
                "for a destination": mean("baton_room_phase_seconds", "prefill", phase="bootstrapping"),
                "for space on prefill": mean(
                    "baton_room_phase_seconds", "prefill", phase="waiting_for_input"
                ),
                "computing": f"clamp_min({mean('baton_prefill_first_token_seconds')}"
                f" - {mean('baton_room_phase_seconds', 'prefill', phase='bootstrapping')}"
                f" - {mean('baton_room_phase_seconds', 'prefill', phase='waiting_for_input')}, 0)",
            },
            unit="s",
            stacked=True,
        ),
        Panel(
            "Hand-over",
            "From a room's arrival at decode until it was admitted. It includes the computation; the first"
            " token does not wait for it.",
            {
                "p50": quantile(0.5, "baton_handover_seconds"),
                "p99": quantile(0.99, "baton_handover_seconds"),
                "p99 compute and write": quantile(0.99, "baton_kv_transfer_seconds"),
            },
            unit="s",
        ),
        Panel(
            "Decode: time in each phase",
            "Means. Bootstrapping: connecting to the sender. Waiting: for pages. Transferring: prefill"
            " computes and writes.",
            {
                "{{phase}}": "sum by (phase) ("
                + of("decode", per_second("baton_room_phase_seconds_sum", phase="!~success|failed"))
                + ") / sum by (phase) ("
                + of("decode", per_second("baton_room_phase_seconds_count", phase="!~success|failed"))
                + ")"
            },
            unit="s",
            stacked=True,
        ),
        Panel(
            "Transfer",
            "Bytes of KV a second that prefill workers write.",
            {WHO: of("prefill", per_second("baton_kv_transfer_bytes_total"))},
            unit="Bps",
        ),
        Panel(
            "Transfer hidden behind computing",
            "The share of the time of writing that went on beside a step. Near 1 the transfer costs nothing.",
            {
                "hidden": f"sum({per_second('baton_kv_transfer_hidden_seconds_total')})"
                f" / sum({per_second('baton_kv_transfer_busy_seconds_total')})"
            },
            unit="percentunit",
            most=1,
        ),
        Panel(
            "Tokens that were there already",
            "The share of prompts' tokens whose KV was cached: prefill computes, and decode is sent, the"
            " rest.",
            {
                "{{role}}": f"sum by (role) ({of(BOTH, per_second('baton_prefix_reused_tokens_total'))})"
                f" / sum by (role) ({of(BOTH, per_second('baton_prefix_queried_tokens_total'))})"
            },
            unit="percentunit",
            most=1,
        ),
    ),
    "What failed, and why?": (
        Panel(
            "Rooms that failed, by first cause",
            "As the bootstrap knows it: one room, one cause. client_gone is a client that hung up. Canaries"
            " are not among them (baton_canaries_failed_total).",
            {
                "{{reason}}": "sum by (reason) ("
                + per_second("baton_rooms_failed_total")
                + f' * {TARGETS} group_left () baton_build_info{{role="bootstrap"}})'
            },
            stacked=True,
        ),
        Panel(
            "Requests that went on in a new room",
            "By what the last room failed of. Their clients saw no error.",
            {"{{reason}}": f"sum by (reason) ({per_second('baton_request_retries_total')})"},
            stacked=True,
        ),
        Panel(
            "Requests without workers",
            "queue_full, too_late and not_in_time are answered 429, no_worker 503.",
            {"{{why}}": f"sum by (why) ({per_second('baton_admission_refused_requests_total')})"},
            stacked=True,
        ),
        Panel(
            "Workers lost",
            "In the interval shown. Exited: its launcher saw it end. Silent: its lease ran out.",
            {
                "{{side}} {{how}}": "sum by (side, how) (increase("
                + now("baton_workers_lost_total")
                + "[$__rate_interval]))"
            },
        ),
        Panel(
            "Errors by route",
            "The ten most frequent answers other than 2xx. 499: the client hung up before its answer.",
            {
                "{{status}} {{route}}": "topk(10, sum by (route, status) ("
                + per_second(REQUESTS, status="!~2..")
                + ") > 0)"
            },
            unit="reqps",
        ),
        Panel(
            "News that came too late, lines that were lost",
            "News about rooms that are over is dropped and normal around failures. Lost lines are gaps in"
            " timelines.",
            {
                "late news {{worker}}": of(BOTH, per_second("baton_rooms_unknown_news_total")),
                "lost lines {{worker}}": of(BOTH, per_second("baton_timeline_lines_dropped_total")),
            },
        ),
    ),
    "Is memory kept?": (
        Panel(
            "Decode: pages by state",
            "Exposed: a prefill worker may write there. Quarantined: its room failed and a write may still"
            " land.",
            {"{{state}}": f"sum by (state) ({led('decode', now('baton_kv_pages'))})"},
            stacked=True,
        ),
        Panel(
            "Prefill: pages by state",
            "Committed pages are being computed or sent. Cached ones are given up when space is needed.",
            {"{{state}}": f"sum by (state) ({led('prefill', now('baton_kv_pages'))})"},
            stacked=True,
        ),
        Panel(
            "Pages in quarantine",
            "Back to 0 within moments, unless a sender neither answers nor is known to be gone.",
            {WHO: of(BOTH, now("baton_kv_pages", state="quarantined"))},
        ),
        Panel(
            "Metadata slots by state",
            "One for each room. They go the ways of the pages.",
            {
                "{{role}} {{state}}": "sum by (role, state) ("
                + led(BOTH, now("baton_metadata_slots", state="!free"))
                + ")"
            },
            stacked=True,
        ),
        Panel(
            "Rooms by phase",
            "What each side holds. Failed rooms wait for the proof that nothing is written any more.",
            {"{{role}} {{phase}}": f"sum by (role, phase) ({led(BOTH, now('baton_rooms'))})"},
            stacked=True,
        ),
        Panel(
            "Memory taken back",
            "Times that a decode worker took its exposed memory back from silent senders, since its start.",
            {"{{worker}}": of("decode", now("baton_kv_revocations_total"))},
        ),
    ),
    "Are groups healthy?": (
        Panel(
            "Turns a second",
            "At least one while idle. Ranks of a worker take the same turns.",
            {WHO: of(BOTH, per_second("baton_turns_total"))},
        ),
        Panel(
            "Agreement, p99",
            "The one collective of a turn. A rank that is late is waited for by all.",
            {WHO: quantile(0.99, "baton_agreement_seconds", "worker, rank", BOTH)},
            unit="s",
        ),
        Panel(
            "Leases",
            "Renewed and failed, a second. A worker that fails for as long as a lease is lost.",
            {
                "renewed {{worker}}": of(BOTH, per_second("baton_lease_renewals_total")),
                "failed {{worker}}": of(BOTH, per_second("baton_lease_failures_total")),
            },
        ),
        Panel(
            "Up since",
            "How long each process has been running. A group starts again as a whole.",
            {WHO: "time() - (" + of(".*", now("process_start_time_seconds")) + ")"},
            unit="s",
        ),
        Panel(
            "CPU",
            "Cores that each process uses. The bootstrap is one process with one event loop: near 1 it is"
            " full.",
            {WHO: of(".*", per_second("process_cpu_seconds_total"))},
        ),
        Panel(
            "Resident memory",
            "Of each process, on the host.",
            {WHO: of(".*", now("process_resident_memory_bytes"))},
            unit="bytes",
        ),
    ),
}
