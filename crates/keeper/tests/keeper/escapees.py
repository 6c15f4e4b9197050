"""An agent whose processes are hard to end: COUNT of one KIND. All ignore SIGTERM, and their parents have exited.

Prints the pid of each, then `ready`, then waits. For a storm it prints the pids of the first processes.
"""

import os
import signal
import sys
import time
import time


start_reader, start_writer = os.pipe()


def wait():
    while True:
        signal.pause()


def print_line(text):
    os.write(1, b"%s\n" % str(text).encode())


def stubborn():
    """Only ignores SIGTERM."""
    print_line(os.getpid())
    wait()


def setsid():
    """Leaves its session and group."""
    os.setsid()
    stubborn()


def double_fork():
    """Becomes a daemon by forking twice."""
    os.setsid()
    if os.fork():
        os._exit(0)
    stubborn()


def stopped():
    """Stops itself, so that only SIGCONT and SIGKILL have an effect."""
    print_line(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    wait()


def grandchild():
    """Has a child in another session."""
    if os.fork() == 0:
        os.setsid()
        stubborn()
    wait()


def storm():
    """Keeps changing its pid: forks and exits, and its child does the same. Every tenth does so without a pause."""
    print_line(os.getpid())
    # Wait until all of them are running.
    os.close(start_writer)
    os.read(start_reader, 1)
    pause = 0.5 if number % 10 else 0
    while True:
        if os.fork():
            os._exit(0)
        time.sleep(pause)


def main():
    global number
    kind, count = globals()[sys.argv[1]], int(sys.argv[2])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The kernel sends SIGHUP to orphaned process groups with stopped members, and would end them for us.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pid_reader, pid_writer = os.pipe()
    for number in range(count):
        parent = os.fork()
        if parent == 0:
            # A process in between exits at once, so that the child loses its parent.
            if os.fork() == 0:
                os.dup2(pid_writer, 1)
                kind()
            os._exit(0)
        os.waitpid(parent, 0)
    pids = b""
    while pids.count(b"\n") < count:
        pids += os.read(pid_reader, 1 << 16)
    os.close(start_writer)
    os.write(1, pids)
    print_line("ready")
    wait()


main()
