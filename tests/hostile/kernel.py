"""System calls that Python has no functions for. Both sides of the hostile suite use them."""

import ctypes
import mmap
import os
import platform
import struct

libc = ctypes.CDLL(None, use_errno=True)

# The numbers differ below 424, where the tables of the architectures were unified.
NUMBERS = {
    "x86_64": {
        "ptrace": 101, "rt_sigqueueinfo": 129, "tgkill": 234, "add_key": 248, "keyctl": 250, "ioprio_set": 251,
        "ioprio_get": 252, "unshare": 272, "perf_event_open": 298, "fanotify_init": 300, "fanotify_mark": 301,
        "prlimit64": 302, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311,
    },
    "aarch64": {
        "ptrace": 117, "rt_sigqueueinfo": 138, "tgkill": 131, "add_key": 217, "keyctl": 219, "ioprio_set": 30,
        "ioprio_get": 31, "unshare": 97, "perf_event_open": 241, "fanotify_init": 262, "fanotify_mark": 263,
        "prlimit64": 261, "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271,
    },
}[platform.machine()] | {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "pidfd_open": 434, "pidfd_getfd": 438,
    "landlock_create_ruleset": 444,
}


def syscall(name, *args):
    """The result, or an OSError."""
    converted = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(ctypes.c_long(NUMBERS[name]), *converted)
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def has_landlock_scopes():
    """Whether this kernel can keep a process from abstract sockets outside."""
    try:
        return syscall("landlock_create_ruleset", None, 0, 1) >= 6
    except OSError:
        return False


def exchange(one, other):
    """Swaps what two paths name, at once."""
    if libc.renameat2(-100, one.encode(), -100, other.encode(), 2) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"renameat2: {os.strerror(error)}")


class IoVector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def transfer_memory(name, pid, address, buffer):
    """process_vm_readv or process_vm_writev between a buffer of ours and an address of another process."""
    local = IoVector(ctypes.addressof(buffer), len(buffer))
    remote = IoVector(address, len(buffer))
    return syscall(name, pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)


def file_handle(path):
    """The handle of a file as (type, bytes)."""
    handle = ctypes.create_string_buffer(8 + 128)
    struct.pack_into("Ii", handle, 0, 128, 0)
    mount = ctypes.c_int()
    syscall("name_to_handle_at", -100, path.encode(), handle, ctypes.byref(mount), 0)
    size, kind = struct.unpack_from("Ii", handle)
    return kind, handle.raw[8:8 + size]


def open_by_handle(mount, kind, raw):
    handle = ctypes.create_string_buffer(struct.pack("Ii", len(raw), kind) + raw)
    return syscall("open_by_handle_at", mount, handle, os.O_RDONLY)


def read_with_io_uring(path):
    """The beginning of a file, opened and read by a ring."""
    params = ctypes.create_string_buffer(120)
    ring = syscall("io_uring_setup", 4, params)
    sq = struct.unpack_from("10I", params, 40)
    cq = struct.unpack_from("10I", params, 80)
    sq_ring = mmap.mmap(ring, sq[6] + 16, offset=0)
    cq_ring = mmap.mmap(ring, cq[5] + 16 * 8, offset=0x8000000)
    entries = mmap.mmap(ring, 64 * 4, offset=0x10000000)

    def submit(opcode, descriptor, address, length, flags):
        tail, = struct.unpack_from("I", sq_ring, sq[1])
        slot = tail & struct.unpack_from("I", sq_ring, sq[2])[0]
        struct.pack_into("BBHiQQIIQQQQ", entries, 64 * slot, opcode, 0, 0, descriptor, 0, address, length, flags, 1, 0, 0, 0)
        struct.pack_into("I", sq_ring, sq[6] + 4 * slot, slot)
        struct.pack_into("I", sq_ring, sq[1], tail + 1)
        syscall("io_uring_enter", ring, 1, 1, 1, None, 0)
        head, = struct.unpack_from("I", cq_ring, cq[0])
        index = head & struct.unpack_from("I", cq_ring, cq[2])[0]
        result, = struct.unpack_from("i", cq_ring, cq[5] + 16 * index + 8)
        struct.pack_into("I", cq_ring, cq[0], head + 1)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    name = ctypes.create_string_buffer(path.encode())
    descriptor = submit(18, -100, ctypes.addressof(name), 0, os.O_RDONLY)
    buffer = ctypes.create_string_buffer(256)
    length = submit(22, descriptor, ctypes.addressof(buffer), 256, 0)
    return buffer.raw[:length].decode()


def disk_of(path):
    """The numbers of the block device that holds a path, or None."""
    device = os.stat(path).st_dev
    numbers = os.major(device), os.minor(device)
    return numbers if os.path.exists(f"/sys/dev/block/{numbers[0]}:{numbers[1]}") else None


def disk_identity(device):
    """The UUID in the superblock of an ext4 file system, which no file shows to others."""
    with open(device, "rb", buffering=0) as disk:
        disk.seek(1024)
        superblock = disk.read(512)
    return superblock[104:120].hex() if superblock[56:58] == b"\x53\xef" else None
