"""Names of the invariants, as code, laws, stories and mutants use them."""

from typing import Final

_NAMES: Final = """
room-unique room-issued terminal-creates-nothing cause-dies-with-room id-carries-no-placement exact-match
incarnation opener-owns adopt-first-wins orphan-ends gone-is-monotone

slot-owner slot-zero one-writer gate-before-agree seal-last schema-agreed record-fits

no-free-under-write source-pinned written-before-sent proof-not-time ack-is-proof exposure-on-page
promise-kept shared-is-read-only same-root-only exits-release-all one-retire stale-never-served no-truncation
layers-by-id choices-apart state-at-its-end

same-turns keyed-votes apply-verdict failure-is-agreed divergence-detected admission-agreed
commands-ordered no-starvation growth-is-agreed drafts-agreed mine-or-granted

terminal-absorbs first-cause-wins moves-listed unknown-has-one-meaning fresh-attempt mask-is-fold
own-draws choices-end-alone drawn-is-drawn not-taken-never-read forced-is-drawn
scored-is-computed scored-once stream-is-prefix

deadline-everywhere terminal-reaches-peer cancel-remembered room-ends each-is-released zero-at-idle
honest-health canary-is-a-request probe-can-fail waiting-has-no-deadline failure-adds-no-load
retracted-is-no-failure full-is-no-failure no-blocking live-is-not-lost reconnect rejected-stays-out
bounded-admission
placed-by-use log-is-tree kept-at-home weight-is-no-state drain-keeps-promises zero-page-hand-over
oldest-goes-on memory-as-used drafts-make-way stall-is-no-work counted-work
silence-is-spoken given-is-taken text-is-not-token

no-pickle known-callers-only exit-by-starter authorised-writer malformed-is-contained secrets-unlogged
"""
INVARIANTS: Final = frozenset(_NAMES.split())

FIELD_DEFECTS: Final = frozenset(
    {"slot-zero", "terminal-creates-nothing", "gate-before-agree", "one-retire", "failure-is-agreed"}
)
"""Invariants that were broken by the five field defects from which this project starts."""
