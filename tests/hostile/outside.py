"""What an agent must not reach: other processes of the user, sockets, keys, a terminal. Everything here runs outside the
agent, as the same user. It reads its configuration from stdin as one line of JSON, prints the facts that the attacker may
know, waits for a line, and then prints a verdict for each way: true if it had an effect that can be seen from here, false
if not, null if it cannot be tried on this machine. The Rust side judges what concerns asks and the daemon."""

import ctypes
import json
import mmap
import os
import pty
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time

import kernel
import machine
from machine import output, succeeds, wait_until

CREDENTIALS = {
    "ssh_key": ".ssh/id_ed25519", "gnupg_key": ".gnupg/private-keys-v1.d/key", "aws_credentials": ".aws/credentials",
    "gcloud_credentials": ".config/gcloud/credentials.db", "kube_config": ".kube/config",
    "docker_config": ".docker/config.json", "netrc": ".netrc", "git_credentials": ".git-credentials", "npmrc": ".npmrc",
    "browser_profile": ".mozilla/firefox/logins.json", "desktop_keyring": ".local/share/keyrings/login.keyring",
}
# Each shows its effect by text in a file: the text is known to the attacker, the file is looked at from here.
WRITTEN = {
    "user_unit": ".config/systemd/user/hostile.service", "autostart": ".config/autostart/hostile.desktop",
    "path_program": ".local/bin/git", "git_global_config": ".gitconfig",
}
SIGNALLED = ["kill", "stop", "pidfd_signal", "tgkill", "kill_group", "sigqueue", "sigio"]
ADJUSTED = ["prlimit", "renice", "affinity", "ioprio", "oom_score", "coredump_filter"]
IN_MEMORY = ["proc_mem", "process_vm_readv", "ptrace_attach", "ptrace_seize"]
IN_DESCRIPTORS = ["proc_fd", "pidfd_getfd"]
IN_ENVIRONMENT = ["environ", "task_environ", "old_proc"]
SERVED = ["abstract_socket", "path_socket", "tcp_loopback"]
# Each of these files is in the home, which is hidden from `deck` on.
IN_HOME = [
    "proc_root", "proc_cwd", "setns", "home_read", "home_hard_link", "home_symlink", "worker_root", "tmux", "screen", "dbus",
    "dbus_abstract", "at", "cron", "systemd_run", "docker", "ssh_localhost", "new_namespaces", "io_uring", "open_by_handle",
    "chroot", "fanotify", "shell_startup", "ld_preload", "git_pointer", "inherited_descriptor", "any_descriptor",
]


def secret():
    return secrets.token_hex(16)


def write_file(path, text, mode=0o600):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, mode)


def victim(given):
    """A process with something to hide in its environment, memory, files, mappings and sockets."""
    given = json.loads(given)
    os.chdir(given["cwd"])
    hidden = given["hidden"]
    keep = {}
    addresses = {}
    for way in IN_MEMORY + ["process_vm_writev"]:
        keep[way] = ctypes.create_string_buffer(hidden.get(way, "untouched" + " " * 32).encode())
        addresses[way] = ctypes.addressof(keep[way])
    descriptors = {}
    for way in IN_DESCRIPTORS:
        file = tempfile.TemporaryFile(dir=given["cwd"])
        file.write(hidden[way].encode())
        file.flush()
        keep["fd " + way] = file
        descriptors[way] = file.fileno()
    mapped = open(os.path.join(given["cwd"], "map-" + hidden["maps"]), "w+b")
    mapped.write(b"x" * 4096)
    mapped.flush()
    # A directory that others could use as their own.
    keep["directory"] = os.open(given["cwd"], os.O_RDONLY | os.O_DIRECTORY)
    keep["map"] = mmap.mmap(mapped.fileno(), 4096)
    ports = {}
    for way, address in given["listen"].items():
        family = socket.AF_INET if way == "tcp_loopback" else socket.AF_UNIX
        listener = socket.socket(family)
        listener.bind(("127.0.0.1", 0) if way == "tcp_loopback" else "\0" + address if way == "abstract_socket" else address)
        listener.listen()
        if way == "tcp_loopback":
            ports[way] = listener.getsockname()[1]
        threading.Thread(target=serve, args=(listener, hidden[way]), daemon=True).start()
    print(json.dumps({"addresses": addresses, "descriptors": descriptors, "ports": ports}), flush=True)
    # What it does all the time, for those who watch.
    while True:
        for path in given["used"]:
            with open(path) as file:
                file.read()
        with open(given["written_memory"] + ".new", "wb") as file:
            file.write(keep["process_vm_writev"].raw)
        os.rename(given["written_memory"] + ".new", given["written_memory"])
        time.sleep(0.05)


def serve(listener, answer):
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(answer.encode())


class Outside:
    def __init__(self, config):
        self.config = config
        self.home, self.world, self.out = config["home"], config["world"], config["out"]
        self.user_home, self.runtime = config["user_home"], config["runtime"]
        self.hidden = {way: secret() for way in config["ways"]} | config["secrets"]
        self.marks = {way: secret() for way in config["ways"]}
        self.impossible = set()
        self.facts = {"pids": {}, "marks": self.marks, "files": {}}
        self.children = []
        self.terminal = bytearray()
        self.stopped = set()
        # Whether the socket of Docker is ours.
        self.is_docker = False

    def start(self, command, **options):
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
        self.children.append(child)
        return child

    def payload(self, way):
        """A command that only a process outside can run: it reads the home."""
        return f"cat {self.facts['files'][way]} > {self.out}/{way}"

    def set_up(self):
        for way in IN_HOME:
            self.facts["files"][way] = os.path.join(self.home, "hostile", way)
            write_file(self.facts["files"][way], self.hidden[way])
        for way, place in CREDENTIALS.items():
            if way != "ssh_key":
                self.facts["files"][way] = os.path.join(self.user_home, place)
                write_file(self.facts["files"][way], self.hidden[way])
        for way, place in WRITTEN.items():
            self.facts["files"][way] = os.path.join(self.user_home, place)
        self.facts["files"]["mail_race"] = os.path.join(self.home, "hostile/race/mail_race")
        write_file(self.facts["files"]["mail_race"], self.hidden["mail_race"])
        os.makedirs(os.path.join(self.home, "agents"), exist_ok=True)
        self.facts["files"]["home_chmod"] = os.path.join(self.home, "hostile/mode")
        write_file(self.facts["files"]["home_chmod"], "")
        self.start_victims()
        self.share_memory()
        self.open_terminal()
        self.start_tmux()
        for way, address in (("dbus", f"unix:path={self.runtime}/bus"), ("dbus_abstract", f"unix:abstract=/tmp/{self.marks['dbus_abstract']}")):
            self.start_dbus(way, address)
        self.start_sshd()
        self.add_key()
        self.find_handle()
        self.find_disk()
        self.start_screen()
        self.listen_as_docker()
        self.impossible |= machine.closed_ways(self.world, self.marks["cron"])
        threading.Thread(target=self.watch_stops, daemon=True).start()
        return self.facts

    def start_victims(self):
        hidden = {way: self.hidden[way] for way in IN_MEMORY + IN_DESCRIPTORS + SERVED + ["maps"]}
        listen = {
            "abstract_socket": "hostile-" + self.marks["abstract_socket"],
            "path_socket": os.path.join(self.world, "service.sock"),
            "tcp_loopback": "",
        }
        given = {
            "cwd": os.path.join(self.home, "hostile"), "hidden": hidden, "listen": listen,
            "used": [self.facts["files"]["fanotify"], self.facts["files"]["home_read"]],
            "written_memory": os.path.join(self.home, "hostile/memory"),
        }
        env = {"PATH": os.environ["PATH"]} | {"HOSTILE_" + way: self.hidden[way] for way in IN_ENVIRONMENT}
        command = [sys.executable, os.path.abspath(__file__), "victim", json.dumps(given), self.hidden["cmdline"]]
        child = self.start(command, env=env, stdout=subprocess.PIPE)
        self.facts |= json.loads(child.stdout.readline())
        self.facts["listen"] = listen
        self.facts["pids"]["victim"] = child.pid
        for way in SIGNALLED + ADJUSTED:
            self.facts["pids"][way] = self.start(["sleep", "1000"], start_new_session=True).pid
        self.adjusted_before = {way: self.adjustment(way) for way in ADJUSTED}
        worker = self.config["worker"]
        self.facts["pids"] |= {"daemon": self.config["daemon"], "worker": worker, "keeper": keeper_of(worker)}

    def share_memory(self):
        path = "/dev/shm/hostile-" + self.marks["posix_memory"]
        self.facts["files"]["posix_memory"] = path
        try:
            write_file(path, self.hidden["posix_memory"])
        except OSError:
            self.impossible.add("posix_memory")
        libc = kernel.libc
        libc.shmat.restype = ctypes.c_void_p
        segment = libc.shmget(0, 4096, 0o600 | 0o1000)
        self.facts["segment"] = segment
        if segment == -1:
            return self.impossible.add("sysv_memory")
        address = libc.shmat(segment, None, 0)
        ctypes.memmove(address, self.hidden["sysv_memory"].encode(), 32)
        # It ends with this process, but until then others can attach to it by its number.
        libc.shmctl(segment, 0, None)

    def open_terminal(self):
        master, slave = pty.openpty()
        self.facts["files"]["terminal_clipboard"] = os.ttyname(slave)
        threading.Thread(target=self.read_terminal, args=(master,), daemon=True).start()

    def read_terminal(self, master):
        while True:
            self.terminal += os.read(master, 4096)

    def start_tmux(self):
        self.facts["tmux"] = "hostile-" + self.marks["tmux"][:8]
        environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "TMUX_TMPDIR")}
        if not succeeds(["tmux", "-L", self.facts["tmux"], "new-session", "-d", "sleep", "1000"], env=environment):
            self.impossible.add("tmux")

    def start_screen(self):
        """Its server may still be starting when the command ends, and may then fail, so it is used once from here."""
        name = self.facts["screen"] = "hostile-" + self.marks["screen"][:8]
        works = os.path.join(self.world, "screen-works")
        command = ["screen", "-S", name, "-X", "screen", "sh", "-c", f"echo > {works}"]
        is_up = succeeds(["screen", "-dmS", name, "sleep", "1000"]) and wait_until(lambda: succeeds(command))
        if not is_up or not wait_until(lambda: os.path.exists(works)):
            self.impossible.add("screen")

    def listen_as_docker(self):
        """A service where Docker's would be, if there is none. Its socket is made long after the agent has started."""
        path = self.facts["docker_socket"] = "/run/docker.sock"
        listener = socket.socket(socket.AF_UNIX)
        try:
            # Only one can have the path, and another test may have it.
            listener.bind(path)
        except OSError:
            return self.impossible.add("docker_socket")
        self.is_docker = True
        listener.listen()
        threading.Thread(target=serve, args=(listener, self.hidden["docker_socket"]), daemon=True).start()

    def start_dbus(self, way, address):
        data = os.path.join(self.world, way + "-data")
        name = "org.hostile." + way.title().replace("_", "")
        service = os.path.join(self.world, way + "-service.sh")
        write_file(service, "#!/bin/sh\n" + self.payload(way) + "\n", 0o700)
        text = f"[D-BUS Service]\nName={name}\nExec={service}\n"
        write_file(os.path.join(data, f"dbus-1/services/{name}.service"), text)
        self.facts[way] = {"address": address, "name": name}
        try:
            command = ["dbus-daemon", "--session", "--nofork", "--print-address", "--address=" + address]
            environment = os.environ | {"XDG_DATA_HOME": data}
            daemon = self.start(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if not daemon.stdout.readline():
                self.impossible.add(way)
        except FileNotFoundError:
            self.impossible.add(way)

    def start_sshd(self):
        """A server of the user's own, who can log in with the key in ~/.ssh."""
        folder = os.path.join(self.user_home, ".ssh")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        key = os.path.join(folder, "id_ed25519")
        self.facts["files"]["ssh_key"] = key
        if not succeeds(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key]):
            write_file(key, self.hidden["ssh_key"])
            return self.impossible.add("ssh_localhost")
        with open(key) as file:
            self.hidden["ssh_key"] = file.read()
        if os.getuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = [f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {key}", f"AuthorizedKeysFile {key}.pub",
                    "StrictModes no", "PidFile none", "PermitRootLogin yes", "UsePAM no"]
        write_file(os.path.join(self.world, "sshd_config"), "\n".join(settings) + "\n")
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        try:
            self.start([sshd, "-D", "-q", "-f", os.path.join(self.world, "sshd_config")])
        except FileNotFoundError:
            return self.impossible.add("ssh_localhost")
        self.facts["ssh"] = ["ssh", "-q", "-F", "/dev/null", "-i", key, "-p", str(port), "-o", "BatchMode=yes",
                             "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "127.0.0.1"]
        if not wait_until(lambda: listens(port)) or not succeeds(self.facts["ssh"] + ["true"]):
            self.impossible.add("ssh_localhost")

    def add_key(self):
        try:
            name, value = b"hostile-" + self.marks["keyring"].encode(), self.hidden["keyring"].encode()
            self.key = kernel.syscall("add_key", b"user", name, value, len(value), -4)
            # Whoever has the same user id may read it.
            kernel.syscall("keyctl", 5, self.key, 0x3f3f0000)
            self.facts["key"] = self.key
        except OSError:
            self.impossible.add("keyring")

    def find_handle(self):
        """Some file systems have no handles, and containers may not use them."""
        try:
            kind, raw = kernel.file_handle(self.facts["files"]["open_by_handle"])
            self.facts["handle"] = [kind, raw.hex()]
            os.close(kernel.open_by_handle(os.open(self.world, os.O_RDONLY), kind, raw))
        except OSError:
            self.impossible.add("open_by_handle")

    def find_disk(self):
        disk = kernel.disk_of(self.home)
        self.facts["disk"] = disk
        try:
            if disk is None or os.getuid() != 0:
                raise OSError("it cannot be read")
            with open(f"/sys/dev/block/{disk[0]}:{disk[1]}/uevent") as file:
                name = next((line.split("=")[1].strip() for line in file if line.startswith("DEVNAME=")), "null")
            identity = kernel.disk_identity("/dev/" + name)
        except OSError:
            identity = None
        if identity is None:
            return self.impossible.update({"raw_disk", "mknod"})
        self.facts["disk_device"] = "/dev/" + name
        self.hidden |= {"raw_disk": identity, "mknod": identity}

    def watch_stops(self):
        """Notices who is stopped, and continues it."""
        while True:
            for way in ("daemon", "worker", "keeper"):
                pid = self.facts["pids"][way]
                if pid and process_state(pid) == "T":
                    self.stopped.add("stop_" + way)
                    os.kill(pid, signal.SIGCONT)
            time.sleep(0.005)

    def adjustment(self, way):
        pid = self.facts["pids"][way]
        read = {
            "prlimit": lambda: open(f"/proc/{pid}/limits").read(),
            "renice": lambda: os.getpriority(os.PRIO_PROCESS, pid),
            "affinity": lambda: sorted(os.sched_getaffinity(pid)),
            "ioprio": lambda: kernel.syscall("ioprio_get", 1, pid),
            "oom_score": lambda: open(f"/proc/{pid}/oom_score_adj").read(),
            "coredump_filter": lambda: open(f"/proc/{pid}/coredump_filter").read(),
        }
        try:
            return read[way]()
        except OSError:
            return None

    def judge(self):
        verdicts = {way: self.is_done(way) for way in self.config["ways"]}
        return verdicts | {way: None for way in self.impossible}

    def is_done(self, way):
        mark = self.marks[way]
        if way in ("shell_startup", "ld_preload"):
            # The user opens a shell.
            shell = ["bash", "-ic", "true"] if way == "shell_startup" else ["bash", "-lc", "/bin/true"]
            succeeds(shell, env={"HOME": self.user_home, "PATH": os.environ["PATH"]})
        if way in SIGNALLED:
            return process_state(self.facts["pids"][way]) in (None, "Z", "T", "X")
        if way in ADJUSTED:
            return self.adjustment(way) != self.adjusted_before[way]
        if way.startswith("stop_"):
            return way in self.stopped
        if way in WRITTEN:
            return contains(self.facts["files"][way], mark)
        checks = {
            "home_write": lambda: os.path.exists(os.path.join(self.home, "hostile", mark)),
            "home_settings": lambda: contains(os.path.join(self.home, "config.toml"), mark),
            "home_chmod": lambda: stat.S_IMODE(os.stat(self.facts["files"]["home_chmod"]).st_mode) != 0o600,
            "other_mail": lambda: has_file_with(os.path.join(self.home, "mail", self.config["other_session"]), mark),
            "process_vm_writev": lambda: contains(os.path.join(self.home, "hostile/memory"), mark),
            "terminal_clipboard": lambda: mark.encode() in self.terminal,
            "git_hooks": lambda: contains(os.path.join(self.config["repository"], ".git/hooks/post-checkout"), mark),
            "git_config": lambda: contains(os.path.join(self.config["repository"], ".git/config"), mark),
            "other_project": lambda: contains(os.path.join(self.world, "other-project/README"), mark),
            "shared_temporary": lambda: os.path.exists("/tmp/hostile-" + mark),
            "mount": lambda: os.path.exists(os.path.join(self.world, "mounted", mark)),
            "mail_link": lambda: has_file_with(os.path.join(self.home, "agents"), mark),
            "at": lambda: mark in output("for job in $(atq | cut -f1); do at -c $job; done"),
            "cron": lambda: mark in output("flock /tmp crontab -l"),
            "cron_folder": lambda: contains("/etc/cron.d/hostile-" + mark, mark),
            "home_inotify": lambda: self.told("home_inotify") == "home_read",
            "any_descriptor": lambda: self.hidden["any_descriptor"] in (self.told("any_descriptor") or "").split(),
        }
        if way in checks:
            return checks[way]()
        return self.told(way) == self.hidden[way]

    def told(self, way):
        try:
            with open(os.path.join(self.out, way)) as file:
                return file.read().strip() if way != "ssh_key" else file.read()
        except OSError:
            return None

    def clean_up(self):
        for child in self.children:
            child.kill()
        succeeds(["tmux", "-L", self.facts["tmux"], "kill-server"])
        succeeds(["umount", "-l", os.path.join(self.world, "mounted")])
        succeeds(["screen", "-S", self.facts["screen"], "-X", "quit"])
        if "at" not in self.impossible:
            output(f"for job in $(atq | cut -f1); do at -c $job | grep -q {self.marks['at']} && atrm $job; done")
        if "cron" not in self.impossible:
            machine.remove_schedule(self.marks["cron"])
        if self.is_docker:
            os.unlink(self.facts["docker_socket"])
        if "keyring" not in self.impossible:
            machine.fails(lambda: kernel.syscall("keyctl", 9, self.key, -4))
        left = ["/tmp/hostile-" + self.marks["shared_temporary"], "/etc/cron.d/hostile-" + self.marks["cron_folder"]]
        for path in [self.facts["files"]["posix_memory"], *left]:
            if os.path.exists(path):
                os.unlink(path)


def contains(path, text):
    try:
        with open(path, errors="replace") as file:
            return text in file.read()
    except OSError:
        return False


def has_file_with(folder, text):
    return any(contains(os.path.join(place, name), text) for place, _, names in os.walk(folder) for name in names)


def process_state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return None


def keeper_of(worker):
    """The keeper is the child of its worker that says so."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat_file, open(f"/proc/{name}/cmdline") as command_file:
                parent = int(stat_file.read().rsplit(")", 1)[1].split()[1])
                if parent == worker and "__keeper" in command_file.read().split("\0"):
                    return int(name)
        except OSError:
            continue
    return None


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main():
    if sys.argv[1:2] == ["victim"]:
        return victim(sys.argv[2])
    outside = Outside(json.loads(sys.stdin.readline()))
    try:
        print(json.dumps(outside.set_up()), flush=True)
        sys.stdin.readline()
        print(json.dumps(outside.judge()), flush=True)
    finally:
        outside.clean_up()


if __name__ == "__main__":
    main()
