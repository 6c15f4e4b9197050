"""An agent whose processes do not want to end: COUNT of one KIND. All of them ignore SIGTERM and have lost their parent.

Says the pid of each, then `ready`, then waits. What it says of a storm is where it began.
"""

import os
import signal
import sys
import time
import time


beginning, signal_to_begin = os.pipe()


def wait():
    while True:
        signal.pause()


def say(word):
    os.write(1, b"%s\n" % str(word).encode())


def stubborn():
    """Does nothing more than ignore SIGTERM."""
    say(os.getpid())
    wait()


def setsid():
    """Leaves its session and group."""
    os.setsid()
    stubborn()


def double_fork():
    """Becomes a daemon in the old way."""
    os.setsid()
    if os.fork():
        os._exit(0)
    stubborn()


def stopped():
    """Stops itself, and does not hear anything but SIGCONT and SIGKILL."""
    say(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    wait()


def grandchild():
    """Has a child in another session, and leaves it alone as soon as it can."""
    if os.fork() == 0:
        os.setsid()
        stubborn()
    wait()


def storm():
    """Is never where it was: forks and ends, and its child does the same. Every tenth does so without a pause."""
    say(os.getpid())
    # Not before all are there.
    os.close(signal_to_begin)
    os.read(beginning, 1)
    pause = 0.5 if number % 10 else 0
    while True:
        if os.fork():
            os._exit(0)
        time.sleep(pause)


def main():
    global number
    kind, count = globals()[sys.argv[1]], int(sys.argv[2])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The kernel sends it to groups with stopped members whose parents are gone, and would do our work.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    told, tell = os.pipe()
    for number in range(count):
        parent = os.fork()
        if parent == 0:
            # Its parent is between it and us, and ends.
            if os.fork() == 0:
                os.dup2(tell, 1)
                kind()
            os._exit(0)
        os.waitpid(parent, 0)
    said = b""
    while said.count(b"\n") < count:
        said += os.read(told, 1 << 16)
    os.close(signal_to_begin)
    os.write(1, said)
    say("ready")
    wait()


main()
