"""What all ways of the hostile agent share: the facts that it was told, how it reports, and how it speaks to the daemon."""

import json
import os
import socket
import subprocess
import sys
import time

with open(sys.argv[1]) as file:
    FACTS = json.load(file)
PIDS, FILES, MARKS, OUT = FACTS["pids"], FACTS["files"], FACTS["marks"], FACTS["out"]
WAYS = {}
# How long one way may take.
PATIENCE_S = 20


def way(attempt):
    WAYS[attempt.__name__] = attempt
    return attempt


def tell(name, text):
    with open(os.path.join(OUT, name), "w") as file:
        file.write(text)


def wait_for_file(path):
    """Waits until the file has content."""
    deadline = time.monotonic() + PATIENCE_S / 2
    while not (os.path.exists(path) and os.path.getsize(path)) and time.monotonic() < deadline:
        time.sleep(0.02)


def read(path):
    with open(path, errors="replace") as file:
        return file.read()


def write(path, text, mode=None):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a") as file:
        file.write(text)
    if mode is not None:
        os.chmod(path, mode)


def run(*command, **options):
    subprocess.run(command, timeout=PATIENCE_S, check=True, stdin=subprocess.DEVNULL, **options)


def payload(name):
    """A command that succeeds only outside."""
    return f"cat {FILES[name]} > {OUT}/{name}"


def variable(text, name):
    return next(item.split("=", 1)[1] for item in text.split("\0") if item.startswith(name + "="))


def write_to(path, text):
    with open(path, "w") as file:
        file.write(text)


def http(connection, method, path, body=None, token=None):
    text = json.dumps(body) if body is not None else ""
    authorization = f"authorization: Bearer {token}\r\n" if token else ""
    request = (f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{authorization}content-type: application/json\r\n"
               f"content-length: {len(text)}\r\nconnection: close\r\n\r\n{text}")
    connection.sendall(request.encode())
    answer = b""
    while piece := connection.recv(65536):
        answer += piece
    return answer.decode(errors="replace")


def answer(name, connection, token=None):
    return http(connection, "POST", f"/v1/asks/{FACTS['asks'][name]}/answer", {"decision": "allow_once"}, token)


def connect(path):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def daemon_socket():
    return connect(os.path.join(FACTS["home"], "qd.sock"))


def session_socket(session):
    return connect(os.path.join(FACTS["home"], "tools", session, "qd.sock"))
