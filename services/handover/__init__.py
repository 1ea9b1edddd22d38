"""Core of the hand-over of a room's KV cache from a prefill worker to a decode worker.

Each rank of a worker drives one side: `SendingSide` on a prefill worker, `ReceivingSide` on a decode worker.
A side is pure. It has no clock, socket, thread, tensor or logger. Commands, evidence and the time go in.
Requests to the world come out of `take_requests`, in the order in which they are to be carried out.
The workers of a pair exchange messages about their rooms over one session, which is pure in the same way. Its
halves are `ReceivingSession` and `SendingSession`, one for each peer, on the leaders of their workers.
The package imports `baton.rooms`, `baton.pages`, `baton.ids` and `baton.topology` only. Its drivers are
the turn loop with `PrefillWork` and `DecodeWork`, the model, the simulation and the stories.

All ranks of a worker take the same turns. `Turn` has the order of a turn, from a rank's votes to how soon
the next turn follows. One turn of a driver, for either side:

```
for command in commands:                  # the same commands in the same order on every rank
    apply(side, command)                  # open, cancel, grant, close, depart, drain, ...
    carry_out(side.take_requests())
observe(side)                             # poll, sent, computed, drawn, summed: this rank's evidence
turn = Turn(number, side.roster, now_ms, side.capacity(), ...)
turn.agree(minimum_over_all_ranks(turn.ballot.encode()))
side.agreed(...)                          # every rank has carried out its requests of the turn before
causes = turn.causes()                    # None if no room ends
for room, effect in turn.settle(() if causes is None else gather_from_all_ranks(causes)):
    side.perform(room, effect, now_ms)
    carry_out(side.take_requests())
if turn.computes:
    start_step(side)
lap = turn.end(...)                       # leave, or take the next turn, at once or later
```

After each call the driver takes the requests and carries them out. To carry one out decides nothing. Its
result enters the core later, as a command or as evidence. The duties of a driver, by request:

* `Report`: write a line of the room's timeline.
* `Outcome`: send the caller of the room its last reply.
* `Retired`: forget the room: every answer or timer that still waits for it is void.
* `Forget`: stop all calls to the peer: its process is gone.
* `Connect`: make this worker's memory known to the sender, then `connected` on every rank.
* `Grant`: send the sender the pages and the slot, once: a refusal becomes `cancel`.
* `ClaimRoom`: notify the sender that this worker computes the prompt.
* `Close`: repeat the close until the sender answers, then `quiet` on every rank.
* `SumPages`: sum the pages on the engine's thread, then `summed`.
* `Join`: add the room's choices to the batch, then `drawn` for each token.
* `BeginWrites`: prepare the writes to the receiver: the room's rows may be computed from now on.
* `SendPages`: write the whole pages of the first tokens, in windows.
* `SendRecord`: write the metadata record to each rank of the receiver.
* `SendSeal`: write the seal, after all ranks agreed that everything else is written.

A driver of a half of a session carries its messages, and carries out its requests:

* It sends what `take_connect`, `take_grant` and `take_closes` return, for as long as `is_due`.
* It passes answers to `receive`, and the end of a stream to `stream_ended`.
* It passes the result of each `ApplyGrant`, `ApplyClose` and `AwaitQuiet` back to `SendingSession`.
* `StartTimer`: call `fire` after the time. `StopTimer`: do not.

`OpenedRoom` is the same room at its opener: the process that opened it, and reads the streams of both
workers. It is pure, too. Messages of the workers enter, and so do the client's commands and the ends of
timers. Requests come out: messages to the workers, tokens for the client in order, the room's end with its
cause, and pauses. `opener_messages` lists them. Tokens that only continue a choice are not among them.
`receive` returns these at once. Its drivers are `RoomStream`, the model and stories.

Rules for a driver:

* The same commands and the same verdicts reach all ranks. Evidence may differ, and is never taken back.
* No step runs on any rank while `space_for`, `reach` or `revoked` is called.
* A page or slot that a request names stays the room's until its `Retired`.
* Time is in milliseconds of this rank's clock (`now_ms`). Ranks need no common clock.
"""
