"""Takes the place of Python where Ray starts a worker: asks the fork server for one that has vLLM
imported, or is one itself where there is no fork server.

Runs before anything is imported, and imports nothing but what comes with Python.
"""

import json
import os
import socket
import sys

TIMEOUT_S = 200.0
"""For the fork server's imports; a worker that comes later than 300 s is too late for Ray."""

ADDRESS_VARIABLE = "STERNA_FORK_SERVER"


def main() -> None:
    """Have the rest of the command line run, here or in a fork."""
    leave_removed_folder()
    # Python's own option, which Ray may give: a fork's streams are not buffered either.
    arguments = [each for each in sys.argv[1:] if each != "-u"]
    address = os.environ.get(ADDRESS_VARIABLE)
    if address is None or not _is_forked(address, arguments):
        os.execv(sys.executable, [sys.executable, *arguments])


def leave_removed_folder() -> None:
    """Go to the root folder where that of this process has been removed: Ray and Python start
    little without one."""
    try:
        os.getcwd()
    except OSError:
        os.chdir("/")


def _is_forked(address: str, arguments: list[str]) -> bool:
    try:
        question = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
        }
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(address)
            # The descriptors go with the first byte; the kernel may take the rest in parts.
            content = json.dumps(question).encode()
            num_sent = socket.send_fds(connection, [content], [0, 1, 2])
            connection.sendall(content[num_sent:])
            connection.shutdown(socket.SHUT_WR)
            return bool(connection.recv(64))
    except OSError:
        return False


if __name__ == "__main__":
    main()
