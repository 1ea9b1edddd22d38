"""Program of the fork server, from which workers are forked: `python -m baton.cli.forked_commands SOCKET`.

`SOCKET`: number of the inherited socket on which requests come (`launch.fork_server`).
"""

import socket
import sys

from baton.cli.main import serve_forked_commands

if __name__ == "__main__":
    serve_forked_commands(socket.socket(fileno=int(sys.argv[1])))
