"""The hostile agent. It runs below a session's agent and tries one way after the other, each in a process of its own. What
it finds it writes to a file named after the way; whether that means anything is judged from outside. Its first argument is
the file with the facts: process ids, paths and addresses, but no secrets. Further arguments name the ways that it tries
after it has left the agent."""

import os
import signal
import sys

import attack_files
import attack_processes
import attack_system
from attack_daemon import kill_daemon, orphan_answers, own_daemon
from attack_tools import FACTS, OUT, PATIENCE_S, WAYS, answer, daemon_socket, http, tell, wait_for_file

ESCAPED_WAYS = {"orphan_answers": orphan_answers, "kill_daemon": kill_daemon, "own_daemon": own_daemon}


def attempt(name, function):
    """Tries one way in a process of its own. What it reports about failures helps to understand the table."""
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        try:
            function()
            os._exit(0)
        except BaseException as error:
            tell(name + ".failed", f"{type(error).__name__}: {error}")
            os._exit(1)
    os.waitpid(child, 0)


def main():
    os.makedirs(OUT, exist_ok=True)
    mode = sys.argv[2:]
    if mode[:1] == ["answer"]:
        return answer(mode[1], daemon_socket())
    if mode[:1] == ["look"]:
        return tell(mode[1], http(daemon_socket(), "GET", FACTS["other_path"]))
    if mode[:1] == ["escaped"]:
        # No children here: these are about what this process itself may do.
        for name in mode[1:]:
            try:
                ESCAPED_WAYS[name]()
            except Exception as error:
                tell(name + ".failed", f"{type(error).__name__}: {error}")
        return
    tell("begun-" + "-".join(mode), "")
    # Until then, the daemon still has to answer those who had us started.
    wait_for_file(os.path.join(OUT, "go-" + "-".join(mode)))
    if mode:
        return escape(mode)
    for name, function in WAYS.items():
        if name in FACTS["tried"]:
            attempt(name, function)


def escape(ways):
    """Tries these ways in a process that has left the agent's: a session of its own, no parent, no environment."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            command = [sys.executable, __file__, sys.argv[1], "escaped", *ways]
            os.execve(sys.executable, command, {"PATH": os.environ["PATH"]})
        os._exit(0)


if __name__ == "__main__":
    main()
