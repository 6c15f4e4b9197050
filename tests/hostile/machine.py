"""Which ways cannot be tried on this machine: a program is missing or does not work, or a setting of the kernel closes the
way for everybody. Each is found out by trying it outside the agent."""

import os
import shutil
import subprocess
import time

import kernel

# A setting of the kernel can keep ordinary users from tracing what they have not started.
TRACED = ["proc_mem", "process_vm_readv", "process_vm_writev", "ptrace_attach", "ptrace_seize", "pidfd_getfd", "daemon_memory"]
# How long one command may take, and how long something is waited for.
PATIENCE_S = 20


def closed_ways(world, mark):
    """The ways that are closed here without any confinement."""
    trials = {
        "docker": lambda: succeeds(["docker", "run", "--rm", "busybox", "true"]),
        "at": can_schedule_once,
        "cron": lambda: can_schedule(mark),
        "cron_folder": lambda: os.access("/etc/cron.d", os.W_OK),
        "systemd_run": lambda: succeeds(["systemd-run", "--user", "--wait", "true"]),
        "setuid": lambda: succeeds([os.path.join(world, "setuid-cat"), os.path.join(world, "root-file")]),
        "new_namespaces": lambda: succeeds(["unshare", "-Urm", "true"]),
        "old_proc": lambda: succeeds(["unshare", "-m", "umount", "-l", "/proc"]),
        "setns": lambda: succeeds(["unshare", "-m", "true"]),
        "mount": lambda: succeeds(["unshare", "-m", "mount", "-t", "tmpfs", "none", world]),
        "io_uring": lambda: not fails(lambda: kernel.read_with_io_uring(__file__)),
        "fanotify": lambda: not fails(lambda: os.close(kernel.syscall("fanotify_init", 0, os.O_RDONLY))),
        # To bind a process to one processor changes something only if there are more.
        "affinity": lambda: len(os.sched_getaffinity(0)) > 1,
        "shell_startup": lambda: shutil.which("bash"),
        "ld_preload": lambda: shutil.which("bash") and shutil.which("cc"),
    }
    closed = {way for way, is_open in trials.items() if not is_open()}
    # `qd doctor` says so, and docs/sandbox.md that no level closes these there.
    closed |= set() if kernel.has_landlock_scopes() else {"abstract_socket", "dbus_abstract"}
    return closed if can_trace_others() else closed | set(TRACED)


def can_trace_others():
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            scope = int(file.read())
    except OSError:
        return True
    return scope == 0 or (scope < 3 and os.getuid() == 0)


def can_schedule_once():
    removal = "sed -n 's/^job \\([0-9]*\\) .*/\\1/p' | grep . | xargs atrm"
    return succeeds(["sh", "-c", "echo : | at now + 1 year 2>&1 | " + removal])


def can_schedule(mark):
    """The tables of cron are read, changed and written as a whole, so only one test at a time may do that."""
    line = f"@yearly : probe-{mark}"
    add = f"{{ crontab -l; echo '{line}'; }} 2>/dev/null | crontab - && crontab -l | grep -q probe-{mark}"
    is_possible = succeeds(["flock", "/tmp", "sh", "-c", add])
    remove_schedule("probe-" + mark)
    return is_possible


def remove_schedule(text):
    """Removes the lines with this text from the user's table of cron, and the table if nothing is left."""
    remove = f"crontab -l | grep -q {text} || exit; left=$(crontab -l | grep -v {text}) && echo \"$left\" | crontab - || crontab -r"
    succeeds(["flock", "/tmp", "sh", "-c", remove])


def fails(action):
    try:
        action()
        return False
    except OSError:
        return True


def succeeds(command, env=None):
    """A session of its own, because an interactive shell stops everybody in its own if that is not in the foreground."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.run(command, env=env, timeout=PATIENCE_S, start_new_session=True, **quiet).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def output(script):
    """What a shell prints, whether it succeeds or not."""
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    options = {"stdout": subprocess.PIPE, "text": True, "errors": "replace", "start_new_session": True}
    try:
        return subprocess.run(["sh", "-c", script], timeout=PATIENCE_S, **options, **quiet).stdout
    except subprocess.TimeoutExpired:
        return ""


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
