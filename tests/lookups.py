"""Start a command where every look-up of a name is seen; for ``unshare -rnm``, in namespaces of their own.

python lookups.py SECONDS READY COMMAND …: lets it run so long after it has written READY to standard error, and prints
the names that it and its children looked up.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

SET_FLAGS, UP = 0x8914, 0x41


def answer(server: socket.socket) -> None:
    """Print each name and say that there is none such."""
    while True:
        query, address = server.recvfrom(4096)
        labels, place = [], 12
        while query[place]:
            labels.append(query[place + 1 : place + 1 + query[place]].decode())
            place += 1 + query[place]
        print(".".join(labels), flush=True)
        server.sendto(query[:2] + b"\x81\x83" + query[4:6] + bytes(6) + query[12:], address)


def main() -> None:
    """Be the only name server of this namespace while the command runs."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh", b"lo", UP))
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        file.flush()
        os.chmod(file.name, 0o644)
        subprocess.run(["mount", "--bind", file.name, os.path.realpath("/etc/resolv.conf")], check=True)
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind(("127.0.0.1", 53))
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        seconds, ready, *command = sys.argv[1:]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr:
                print(line, end="", file=sys.stderr)
                if ready in line:
                    time.sleep(float(seconds))
                    break
            process.terminate()


if __name__ == "__main__":
    main()
