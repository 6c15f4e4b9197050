#!/usr/bin/env python3
"""A whole worker in plain Python: says its assignment in capitals, word by word, then what it is told on its way; asks
before it says anything with `rm` in it; stops when it is told to. `crates/link/examples/worker.rs` is the same in Rust.
`python3 examples/worker.py [HOST:PORT]` prints where it listens. Any WebSocket client can then send it
`{"kind":"run","assignment":"hello world"}`, then `{"kind":"message","text":"and more"}` or `{"kind":"cancel"}`."""
import queue
import secrets
import sys
import threading

import websocket  # The one beside this file.

PACE = 0.02  # Thinking takes time, also for a worker that does not think.


def shout(parent, assignment, inbox):
    """One run, up to its terminal. All that the parent says meanwhile is in the inbox."""
    words, said, ask = assignment.split(), [], None
    if "rm" in assignment:
        ask = secrets.token_hex(16)  # Nobody can guess it.
        body = {"tool_name": "say", "permission_type": "", "resource": assignment, "question": "May I say `rm`?"}
        parent.send({"kind": "approval_request", "id": ask, "body": body})
    while words:
        try:
            match inbox.get(timeout=None if ask else PACE):
                case {"kind": "cancel"}:
                    return parent.send({"kind": "terminal", "status": "cancelled"})
                case {"kind": "message", "text": str(text)}:
                    words += text.split()
                case {"kind": "approval_reply", "id": name, "approved": True} if name == ask:
                    ask = None
                case {"kind": "approval_reply", "id": name, "approved": False} if name == ask:
                    return parent.send({"kind": "terminal", "status": "error", "error": "not allowed to say that"})
        except queue.Empty:  # Nothing came: time for the next word.
            said.append(words.pop(0).upper())
            parent.send({"kind": "event", "event": {"type": "token", "content": said[-1] + " "}})
    parent.send({"kind": "event", "event": {"type": "complete"}})
    parent.send({"kind": "terminal", "status": "completed", "result": " ".join(said)})


def serve(parent):
    """One connection: starts runs, and gives everything else to the one that is active."""
    inbox, run = queue.SimpleQueue(), None
    for frame in parent.frames():
        match frame:
            case {"kind": "run", "assignment": str(assignment)}:
                inbox.put({"kind": "cancel"})
                if run:
                    run.join()  # Its terminal comes before anything of the new run.
                inbox = queue.SimpleQueue()
                run = threading.Thread(target=shout, args=(parent, assignment, inbox), daemon=True)
                run.start()
            case _:
                inbox.put(frame)
    inbox.put({"kind": "cancel"})  # A closed connection cancels its run.


websocket.listen(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:0", serve)
