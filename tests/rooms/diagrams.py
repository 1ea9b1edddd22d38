"""Diagrams of the room phases in the docs, drawn from the transition tables."""

from baton.rooms.phases import LOCAL_MOVES, RECEIVER_MOVES, SENDER_MOVES, Moves, Phase, Side, Vote


def mermaid(side: Side) -> str:
    """A Mermaid state diagram of one side's table."""
    tables: list[Moves] = [SENDER_MOVES] if side is Side.PREFILL else [RECEIVER_MOVES, LOCAL_MOVES]
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.BOOTSTRAPPING.value}: the registry opened the room"]
    moves = dict.fromkeys(move for table in tables for move in table.items())
    for (phase, vote), (after, effect) in moves:
        every = "any rank" if vote is Vote.ABORT else "all ranks"
        lines.append(f"    {phase.value} --> {after.value}: {every} {vote.name} / {effect.value}")
    lines.append(f"    {Phase.RETIRED.value} --> [*]")
    return "\n".join(lines)
