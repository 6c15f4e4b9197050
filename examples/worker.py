#!/usr/bin/env python3
"""A complete worker in plain Python. It outputs its assignment in capitals, word by word, followed by the steers that
it receives. It asks for approval if the assignment contains `rm`, and stops when it is cancelled.
`crates/worker-sdk/examples/worker.rs` is the same worker in Rust.

`python3 examples/worker.py [HOST:PORT]` prints its address. Any WebSocket client can then send it
`{"kind":"run","assignment":"hello world"}`, then `{"kind":"message","text":"and more"}` or `{"kind":"cancel"}`."""
import queue
import secrets
import sys
import threading

import websocket  # The module beside this file.

PACE = 0.02  # Seconds per word, so that there is time to steer and cancel.


def shout(parent, assignment, inbox):
    """One run, up to its terminal frame. Frames from the parent arrive in the inbox."""
    words, output, approval = assignment.split(), [], None
    if "rm" in assignment:
        approval = secrets.token_hex(16)  # The id must not be guessable.
        body = {"tool_name": "say", "permission_type": "", "resource": assignment, "question": "May I say `rm`?"}
        parent.send({"kind": "approval_request", "id": approval, "body": body})
    while words:
        try:
            match inbox.get(timeout=None if approval else PACE):
                case {"kind": "cancel"}:
                    return parent.send({"kind": "terminal", "status": "cancelled"})
                case {"kind": "message", "text": str(text)}:
                    words += text.split()
                case {"kind": "approval_reply", "id": reply, "approved": True} if reply == approval:
                    approval = None
                case {"kind": "approval_reply", "id": reply, "approved": False} if reply == approval:
                    return parent.send({"kind": "terminal", "status": "error", "error": "not allowed to say that"})
        except queue.Empty:  # No frame arrived: output the next word.
            output.append(words.pop(0).upper())
            parent.send({"kind": "event", "event": {"type": "token", "content": output[-1] + " "}})
    parent.send({"kind": "event", "event": {"type": "complete"}})
    parent.send({"kind": "terminal", "status": "completed", "result": " ".join(output)})


def serve(parent):
    """One connection: starts runs and passes all other frames to the active run."""
    inbox, run = queue.SimpleQueue(), None
    for frame in parent.frames():
        match frame:
            case {"kind": "run", "assignment": str(assignment)}:
                inbox.put({"kind": "cancel"})
                if run:
                    run.join()  # Its terminal frame must come before any frame of the new run.
                inbox = queue.SimpleQueue()
                run = threading.Thread(target=shout, args=(parent, assignment, inbox), daemon=True)
                run.start()
            case _:
                inbox.put(frame)
    inbox.put({"kind": "cancel"})  # A closed connection cancels its run.


websocket.listen(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:0", serve)
