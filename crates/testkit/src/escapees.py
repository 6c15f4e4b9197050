"""Processes that resist being killed: `escapees.py KIND COUNT DIR`.

Each ignores every polite signal, loses its parent, and creates a file KIND.PID in DIR when it is ready. None outlives
its test by much: all of them exit when DIR is gone, and after LIFE seconds.
"""

import os
import signal
import sys
import time

LIFE = 60
POLITE = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT]
kind, count, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ends = time.time() + LIFE


def run_orphaned(action):
    """Runs `action` in a grandchild whose parent has exited."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    action()
    os._exit(0)


def ready():
    open(os.path.join(folder, f"{kind}.{os.getpid()}"), "w").close()


def should_stay():
    return time.time() < ends and os.path.isdir(folder)


def stay():
    ready()
    while should_stay():
        time.sleep(0.2)


def setsid():
    os.setsid()
    stay()


def stop():
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
    stay()


def storm():
    """Forks and exits all the time, so a search finds only its dead parent. Some generations stay for a second."""
    ready()
    generation = 0
    while should_stay():
        time.sleep(0.01)
        generation += 1
        if os.fork():
            if generation % 5:
                os._exit(0)
            time.sleep(1)
            os._exit(0)


def grandchild():
    """A child of a child, whose parents exit one after the other."""
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
    # This kind stays in its process group and session; its parent exits when all are started.
    if kind == "ignores_sigterm":
        if not os.fork():
            stay()
            os._exit(0)
    else:
        run_orphaned(kinds[kind])
