"""Bookkeeping of KV memory: pages, metadata slots, prefix cache, layouts and the plan of a transfer.

`Holdings` is the entry point: the sides of a hand-over (`baton.handover`) reserve, expose, commit, quarantine
and give back a room's memory through it. `plan_hand_over` plans which bytes go where, once per pair of
workers. The package is pure, without clock, socket, tensor or thread. It imports `baton.ids` and
`baton.topology` only.
"""
