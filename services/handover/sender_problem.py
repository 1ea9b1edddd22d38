"""Problems of a decode worker with one prefill worker, in the kinds that it treats differently."""

from dataclasses import dataclass
from enum import Enum

from baton.rooms.errors import Reason


class ProblemKind(Enum):
    REFUSED = "refused"
    """Kind: the sender refused a message, and would refuse it again."""
    NOT_CONNECTED = "not connected"
    """Kind: the sender has no connection to this memory. It can be made anew when no write is under way."""
    NOT_QUIET = "not quiet"
    """Kind: the sender cannot connect, because it has not seen the end of writes over a broken connection."""
    LOST = "lost"
    """Kind: the stream ended without an error of the sender. It is stopped, dead or cut off."""
    OTHER_PROCESS = "other process"
    """Kind: another process has the sender's address, so the sender is gone."""
    SEND_AGAIN = "send again"
    """Kind: the stream ended before the sender took any message. It says nothing about the sender, and all
    messages are sent again."""


@dataclass(frozen=True, slots=True)
class SenderProblem:
    kind: ProblemKind
    text: str

    @property
    def may_pass(self) -> bool:
        """Whether a refused connect may succeed later, because a connection is made anew once it has no
        write under way."""
        return self.kind in (ProblemKind.NOT_CONNECTED, ProblemKind.NOT_QUIET)

    @property
    def reason(self) -> Reason:
        """Reason for which rooms of the sender end."""
        is_gone = self.kind in (ProblemKind.LOST, ProblemKind.OTHER_PROCESS)
        return Reason.PREFILL_LOST if is_gone else Reason.CONNECT_FAILED
