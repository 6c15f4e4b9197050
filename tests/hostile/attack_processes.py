"""Ways of the hostile agent against other processes of the user."""

import ctypes
import fcntl
import os
import signal
import struct
import time

import kernel
from attack_tools import FACTS, FILES, MARKS, PIDS, read, tell, variable, way, write_to


# Other processes of the user.

@way
def environ():
    tell("environ", variable(read(f"/proc/{PIDS['victim']}/environ"), "HOSTILE_environ"))


@way
def task_environ():
    pid = PIDS["victim"]
    tell("task_environ", variable(read(f"/proc/{pid}/task/{pid}/environ"), "HOSTILE_task_environ"))


@way
def cmdline():
    tell("cmdline", read(f"/proc/{PIDS['victim']}/cmdline").rstrip("\0").split("\0")[-1])


@way
def maps():
    line = next(line for line in read(f"/proc/{PIDS['victim']}/maps").splitlines() if "/map-" in line)
    tell("maps", line.rsplit("/map-", 1)[1])


@way
def proc_mem():
    with open(f"/proc/{PIDS['victim']}/mem", "rb", buffering=0) as memory:
        memory.seek(FACTS["addresses"]["proc_mem"])
        tell("proc_mem", memory.read(32).decode())


@way
def process_vm_readv():
    buffer = ctypes.create_string_buffer(32)
    kernel.transfer_memory("process_vm_readv", PIDS["victim"], FACTS["addresses"]["process_vm_readv"], buffer)
    tell("process_vm_readv", buffer.raw.decode())


@way
def process_vm_writev():
    buffer = ctypes.create_string_buffer(MARKS["process_vm_writev"].encode(), 32)
    kernel.transfer_memory("process_vm_writev", PIDS["victim"], FACTS["addresses"]["process_vm_writev"], buffer)
    # The victim copies its memory to a file all the time.
    time.sleep(0.3)


def peek(name):
    words = []
    for offset in range(0, 32, 8):
        word = ctypes.c_long()
        kernel.syscall("ptrace", 2, PIDS["victim"], FACTS["addresses"][name] + offset, ctypes.byref(word))
        words.append(struct.pack("l", word.value))
    tell(name, b"".join(words).decode())


@way
def ptrace_attach():
    kernel.syscall("ptrace", 16, PIDS["victim"], 0, 0)
    os.waitpid(PIDS["victim"], 0x40000000)
    try:
        peek("ptrace_attach")
    finally:
        kernel.syscall("ptrace", 17, PIDS["victim"], 0, 0)


@way
def ptrace_seize():
    kernel.syscall("ptrace", 0x4206, PIDS["victim"], 0, 0)
    kernel.syscall("ptrace", 0x4207, PIDS["victim"], 0, 0)
    os.waitpid(PIDS["victim"], 0x40000000)
    try:
        peek("ptrace_seize")
    finally:
        kernel.syscall("ptrace", 17, PIDS["victim"], 0, 0)


@way
def proc_fd():
    tell("proc_fd", read(f"/proc/{PIDS['victim']}/fd/{FACTS['descriptors']['proc_fd']}"))


@way
def pidfd_getfd():
    descriptor = kernel.syscall("pidfd_getfd", os.pidfd_open(PIDS["victim"]), FACTS["descriptors"]["pidfd_getfd"], 0)
    tell("pidfd_getfd", os.pread(descriptor, 64, 0).decode())


@way
def proc_root():
    tell("proc_root", read(f"/proc/{PIDS['victim']}/root{FILES['proc_root']}"))


@way
def proc_cwd():
    tell("proc_cwd", read(f"/proc/{PIDS['victim']}/cwd/proc_cwd"))


@way
def setns():
    namespace = os.open(f"/proc/{PIDS['victim']}/ns/mnt", os.O_RDONLY)
    kernel.syscall("setns", namespace, 0)
    found = read(FILES["setns"])
    tell("setns", found)


@way
def kill():
    os.kill(PIDS["kill"], signal.SIGKILL)


@way
def stop():
    os.kill(PIDS["stop"], signal.SIGSTOP)


@way
def pidfd_signal():
    signal.pidfd_send_signal(os.pidfd_open(PIDS["pidfd_signal"]), signal.SIGKILL)


@way
def tgkill():
    kernel.syscall("tgkill", PIDS["tgkill"], PIDS["tgkill"], signal.SIGKILL)


@way
def kill_group():
    os.killpg(PIDS["kill_group"], signal.SIGKILL)


@way
def sigqueue():
    info = ctypes.create_string_buffer(struct.pack("iiiiii", signal.SIGTERM, 0, -1, 0, os.getpid(), os.getuid()), 128)
    kernel.syscall("rt_sigqueueinfo", PIDS["sigqueue"], signal.SIGTERM, info)


@way
def sigio():
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, PIDS["sigio"])
    fcntl.fcntl(reader, 10, signal.SIGTERM)
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    os.write(writer, b"x")


@way
def prlimit():
    limit = struct.pack("QQ", 7, 7)
    kernel.syscall("prlimit64", PIDS["prlimit"], 7, limit, None)


@way
def renice():
    os.setpriority(os.PRIO_PROCESS, PIDS["renice"], 15)


@way
def affinity():
    os.sched_setaffinity(PIDS["affinity"], {min(os.sched_getaffinity(0))})


@way
def ioprio():
    kernel.syscall("ioprio_set", 1, PIDS["ioprio"], (3 << 13) | 7)


@way
def oom_score():
    write_to(f"/proc/{PIDS['oom_score']}/oom_score_adj", "1000")


@way
def coredump_filter():
    write_to(f"/proc/{PIDS['coredump_filter']}/coredump_filter", "0x7f")
