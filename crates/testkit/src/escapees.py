"""Processes that do not want to die: `escapees.py KIND COUNT DIR`.

Each ignores every polite signal and has lost its parent; each leaves a file KIND.PID in DIR once it is what it wants to
be. None outlives its test by much: all of them give up when DIR is gone, and after LIFE seconds.
"""

import os
import signal
import sys
import time

LIFE = 60
POLITE = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT]
kind, count, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ends = time.time() + LIFE


def lost(go_on):
    """Goes on in a grandchild whose parent has left."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    go_on()
    os._exit(0)


def ready():
    open(os.path.join(folder, f"{kind}.{os.getpid()}"), "w").close()


def wanted():
    return time.time() < ends and os.path.isdir(folder)


def stay():
    ready()
    while wanted():
        time.sleep(0.2)


def setsid():
    os.setsid()
    stay()


def stop():
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
    stay()


def storm():
    """A process that is always another one: whoever looks for it finds its dead parent. Some stay for a second."""
    ready()
    generation = 0
    while wanted():
        time.sleep(0.01)
        generation += 1
        if os.fork():
            if generation % 5:
                os._exit(0)
            time.sleep(1)
            os._exit(0)


def grandchild():
    """A child of a child, whose parents leave one after the other."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    stay()


kinds = {
    "setsid": setsid,
    "double_fork": stay,
    "ignores_sigterm": stay,
    "stops_itself": stop,
    "fork_storm": storm,
    "grandchild": grandchild,
}
for polite in POLITE:
    signal.signal(polite, signal.SIG_IGN)
for _ in range(count):
    # This kind stays in its group and its session; its parent leaves when all are there.
    if kind == "ignores_sigterm":
        if not os.fork():
            stay()
            os._exit(0)
    else:
        lost(kinds[kind])
