"""Program that Ray starts as a worker in place of Python: it requests a fork from the fork server,
or becomes Python itself if there is no fork server.

It runs before anything is imported, and imports the standard library only.
"""

import json
import os
import socket
import sys

TIMEOUT_S = 200.0
"""Time for the fork server's imports; Ray gives up a worker after 300 s."""

ADDRESS_VARIABLE = "STERNA_FORK_SERVER"


def main() -> None:
    """Run the rest of the command line, here or in a fork."""
    leave_removed_folder()
    # Python's own option, which Ray may add; a fork's streams are not buffered either.
    arguments = [each for each in sys.argv[1:] if each != "-u"]
    address = os.environ.get(ADDRESS_VARIABLE)
    if address is None or not _is_forked(address, arguments):
        os.execv(sys.executable, [sys.executable, *arguments])


def leave_removed_folder() -> None:
    """Change to the root folder if the working folder of this process has been removed: Ray and
    Python need one to start processes."""
    try:
        os.getcwd()
    except OSError:
        os.chdir("/")


def _is_forked(address: str, arguments: list[str]) -> bool:
    try:
        request = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
        }
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(address)
            # The descriptors go with the first byte; the kernel may take the rest in parts.
            content = json.dumps(request).encode()
            num_sent = socket.send_fds(connection, [content], [0, 1, 2])
            connection.sendall(content[num_sent:])
            connection.shutdown(socket.SHUT_WR)
            return bool(connection.recv(64))
    except OSError:
        return False


if __name__ == "__main__":
    main()
