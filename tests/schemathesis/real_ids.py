"""Hooks of schemathesis: generated requests meet things that exist.

A random id finds nothing, so most requests get the id of a workspace, session, run, ask, fleet, message or token that
was made for them over HTTP. What a request would use up (a workspace to delete, an ask to answer) is made anew for it.
In the stateful phase, ids that an earlier answer named stay (`links.py` says which requests follow which).
`QD_URL` is the daemon's address, `QD_TOKEN` its token, and `QD_PROJECT` a git repository with a commit.
"""

import itertools
import json
import os
import time

import requests
import schemathesis
import schemathesis.transport.requests as transport
from links import add_links
from schemathesis.generation.meta import TestPhase

URL = os.environ["QD_URL"]
TOKEN = os.environ["QD_TOKEN"]
PROJECT = os.environ["QD_PROJECT"]
# A script that asks so often that there is always something to answer.
MANY_ASKS = [{"ask": {"tool": "Read", "input": {"path": f"/{number}"}, "risk": "low"}} for number in range(1000)]
# What the agents of the stateful phase do: end at once, ask, or work until they are cancelled.
SCRIPTS = ([{"say": "hello"}], MANY_ASKS[:2], [{"say": "hello"}, {"sleep_ms": 600_000}])


class World:
    """What exists in the daemon, and how more is made."""

    def __init__(self):
        self.http = requests.Session()
        self.http.headers["Authorization"] = f"Bearer {TOKEN}"
        self.numbers = itertools.count()
        # The ids that answers to generated requests have named.
        self.named = set()
        self.workspace = self.post("/v1/workspaces", {"path": PROJECT})["id"]
        self.below = f"/v1/workspaces/{self.workspace}"
        self.viewer = self.new_token("viewer")["token"]
        self.echo = self.new_session("echo")
        self.asking = self.new_session("script")
        self.closed = self.new_session("echo")
        self.worktree = self.new_session("echo", worktree=True)
        self.finished = self.prompt(self.echo, "hello")
        self.waiting = self.prompt(self.asking, json.dumps(MANY_ASKS))
        self.blob = self.new_blob()
        self.prompt(self.worktree, "hello")
        self.http.delete(f"{URL}{self.below}/sessions/{self.closed}").raise_for_status()
        self.fleet = self.new_fleet()
        self.ask()

    def get(self, path):
        response = self.http.get(URL + path)
        response.raise_for_status()
        return response.json()

    def post(self, path, body):
        response = self.http.post(URL + path, json=body)
        if not response.ok:
            raise AssertionError(f"POST {path}: {response.status_code} {response.text}")
        return response.json()

    def new_folder(self):
        path = os.path.join(PROJECT, f"folder-{os.getpid()}-{next(self.numbers)}")
        os.mkdir(path)
        return path

    def new_workspace(self):
        return self.post("/v1/workspaces", {"path": self.new_folder()})["id"]

    def new_session(self, agent, **settings):
        return self.post(f"{self.below}/sessions", {"agent": agent, **settings})["id"]

    def new_worktree(self):
        """A session whose worktree exists: it is made when the agent starts."""
        session = self.new_session("echo", worktree=True)
        self.prompt(session, "hello")
        return session

    def prompt(self, session, text):
        """Sends a prompt, and waits for its end unless it asks."""
        self.lift_halt()
        run = self.post(f"{self.below}/agent", {"session_id": session, "prompt": text})["run_id"]
        if session != self.asking:
            self.get(f"{self.below}/runs/{run}/wait?timeout_s=60")
        return run

    def lift_halt(self):
        """A request before this one may have set a halt, under which nothing starts."""
        self.http.delete(f"{URL}/v1/halt").raise_for_status()

    def queued_run(self):
        """A run that waits behind the one that asks."""
        body = {"session_id": self.asking, "prompt": "later"}
        response = self.http.post(f"{URL}{self.below}/agent", json=body)
        if response.status_code == 429:
            self.http.delete(f"{URL}{self.below}/agent/sessions/{self.asking}/queue").raise_for_status()
            response = self.http.post(f"{URL}{self.below}/agent", json=body)
        response.raise_for_status()
        return response.json()["run_id"]

    def new_blob(self):
        """A prompt that is too large for an event."""
        run = self.prompt(self.echo, "long " * 250_000)
        return self.get(f"{self.below}/runs/{run}")["prompt_blob"]["sha256"]

    def new_fleet(self):
        spec = {"fleet": {"sessions": {"one": {"agent": "echo"}}, "start": "one"}}
        return self.post(f"{self.below}/fleets", {"spec": spec, "task": "hello"})["id"]

    def new_mail(self):
        body = {"text": "hello", "deliver": "hold"}
        return self.post(f"{self.below}/sessions/{self.echo}/mail", body)["id"]

    def new_token(self, role="operator"):
        return self.post("/v1/tokens", {"name": f"token-{os.getpid()}-{next(self.numbers)}", "role": role})

    def ask(self):
        """An ask that waits for its answer. After an answer, the next one comes soon."""
        for _ in range(6000):
            asks = self.get("/v1/asks?state=pending")
            if asks:
                return asks[0]["id"]
            self.lift_halt()
            if not self.get(f"{self.below}/sessions/{self.asking}")["busy"]:
                self.waiting = self.prompt(self.asking, json.dumps(MANY_ASKS))
            time.sleep(0.01)
        raise AssertionError("the script asks nothing")


def made_for(world, case):
    """For each parameter of the path, what this request may find. `None` leaves it as it was generated."""
    method, path = case.method, case.operation.path
    turn = next(world.numbers)

    def one_of(*choices):
        return choices[turn % len(choices)]

    if method == "DELETE" and path == "/v1/workspaces/{w}":
        return {"w": world.new_workspace()}
    if method == "DELETE" and path.endswith("/sessions/{s}"):
        return {"w": world.workspace, "s": world.new_session("echo")}
    if path.endswith(("/merge", "/worktree")) or path == "/v1/worktrees/{s}":
        fresh = one_of(True, False, False)
        return {"w": world.workspace, "s": world.new_worktree() if fresh else one_of(world.echo, world.worktree)}
    if path.endswith("/diff"):
        return {"w": world.workspace, "s": one_of(world.worktree, world.echo)}
    if "/queue/{run}" in path:
        return {"w": world.workspace, "s": world.asking, "run": world.queued_run()}
    if "{m}" in path:
        return {"w": world.workspace, "s": world.echo, "m": world.new_mail()}
    if method == "PATCH":
        # The one that asks must not get a policy that answers.
        return {"w": world.workspace, "s": one_of(world.echo, world.closed, world.worktree)}
    if "{s}" in path:
        return {"w": world.workspace, "s": one_of(world.echo, world.asking, world.closed, world.worktree)}
    if "{run}" in path:
        return {"w": world.workspace, "run": one_of(world.finished, world.waiting)}
    if "{ask}" in path:
        return {"ask": world.ask()}
    if path == "/v1/tokens/{id}":
        return {"id": world.new_token()["id"]}
    if path == "/v1/workers/tokens/{id}":
        return {"id": world.post("/v1/workers/tokens", None)["id"]}
    if "{tool}" in path:
        return {"tool": one_of(*tool_arguments(world))}
    return {"w": world.workspace, "f": world.fleet, "sha256": world.blob}


def tool_arguments(world):
    """What each tool takes."""
    return {
        "list": {},
        "status": {"session": world.echo},
        "wait": {"sessions": [world.echo], "timeout_s": 1},
        "send_message": {"to": world.echo, "text": "hello"},
        "cancel": {"session": world.worktree},
        "spawn_agent": {"agent": "echo", "prompt": "hello", "directory": PROJECT},
        "ask_human": {"question": "Go on?"},
    }


WORLD = World()


def is_generated_wrong(case, location):
    """Whether schemathesis wants this part of the request to be invalid."""
    return case.meta is not None and case.meta.is_negative_at(location)


def is_stateful(case):
    return case.meta is not None and case.meta.phase.name == TestPhase.STATEFUL


@schemathesis.hook
def before_load_schema(context, raw_schema):
    add_links(raw_schema)


@schemathesis.hook
def after_call(context, case, response):
    if is_stateful(case) and 200 <= response.status_code < 300 and response.headers.get("content-type") == ["application/json"]:
        answer = response.json()
        for entry in answer if isinstance(answer, list) else [answer]:
            WORLD.named.update(entry[name] for name in ("id", "run_id") if isinstance(entry.get(name), str))


@schemathesis.hook
def before_call(context, case, kwargs):
    world, turn = WORLD, next(WORLD.numbers)
    follows = any(value in world.named for value in (case.path_parameters or {}).values() if isinstance(value, str))
    if case.path_parameters and not follows and not is_generated_wrong(case, "path") and turn % 4:
        made = made_for(world, case)
        for name in case.path_parameters:
            case.path_parameters[name] = made.get(name) or case.path_parameters[name]
    if isinstance(case.body, dict) and not is_generated_wrong(case, "body"):
        if is_stateful(case):
            fill_stateful_body(world, case, turn)
        else:
            fill_body(world, case.body, turn)
        if turn % 2:
            fill_tool_call(world, case)
    if case.operation.path == "/mcp" and turn % 8:
        case.headers["Accept"] = "application/json, text/event-stream"
    if case.operation.path.endswith("/wait") and not is_generated_wrong(case, "query"):
        # A run that does not end is waited for as long as the request says.
        case.query = {**(case.query if isinstance(case.query, dict) else {}), "timeout_s": 0}
    # The daemon must stay: whoever may only look cannot stop it.
    token = world.viewer if case.operation.path == "/v1/shutdown" else TOKEN
    case.headers["Authorization"] = f"Bearer {token}"


def fill_body(world, body, turn):
    """Names what exists in the fields that name something."""
    known = {
        "session_id": (world.echo, world.asking, world.closed),
        "agent": ("echo", "script", "claude"),
        "parent": (None, world.echo, world.closed),
        "workspace_id": (world.workspace, None),
        "path": (PROJECT, os.path.join(PROJECT, "nothing")),
        "before": (None, world.queued_run),
        "role": ("viewer", "admin"),
    }
    for name in body:
        choices = known.get(name)
        if choices and turn % 3:
            choice = choices[turn // 3 % len(choices)]
            body[name] = choice() if callable(choice) else choice


def fill_stateful_body(world, case, turn):
    """Fills what a scenario needs to get further. The ids in it are from earlier answers."""
    body, operation = case.body, case.operation.definition.raw["operationId"]
    if operation == "create_workspace":
        body["path"] = world.new_folder()
    elif operation == "create_session":
        body.clear()
        body["agent"] = ("echo", "script")[turn % 2]
    elif operation == "send_prompt":
        world.lift_halt()
        body["prompt"] = json.dumps(SCRIPTS[turn % len(SCRIPTS)])
        for name in set(body) - {"session_id", "prompt"}:
            del body[name]


def fill_tool_call(world, case):
    """Replaces a generated object by one that a tool understands."""
    arguments = tool_arguments(world)
    if case.operation.path == "/v1/tools/{tool}":
        case.body = arguments.get(case.path_parameters["tool"], case.body)
    elif case.operation.path == "/mcp":
        tool = tuple(arguments)[next(world.numbers) % len(arguments)]
        params = {"name": tool, "arguments": arguments[tool]}
        case.body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


def read_until_ready(chunks, timeout, max_events=0):
    """Reads an event stream until it is attached; it would never end by itself."""
    content = b""
    for chunk in chunks:
        content += chunk
        if b": ready" in content:
            return content, True
    return content, False


transport.read_event_stream = read_until_ready
