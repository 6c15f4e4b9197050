"""A WebSocket server in plain Python, as much of one as `worker.py` needs: a thread for each connection, JSON in text
frames both ways, pings answered. No web page is let in, and everybody else on this machine is."""
import base64
import contextlib
import hashlib
import json
import socketserver
import threading

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10


def listen(address, serve):
    """Prints where it listens, and calls `serve` with each connection."""

    class Connection(Parent):
        def handle(self):
            if self.upgrade():
                serve(self)

    host, _, port = address.rpartition(":")
    with socketserver.ThreadingTCPServer((host, int(port)), Connection) as server:
        print("listening on ws://%s:%d" % server.server_address, flush=True)
        server.serve_forever()


class Parent(socketserver.StreamRequestHandler):
    # Without it a frame that follows another waits for the peer's delayed acknowledgement, 40 ms.
    disable_nagle_algorithm = True

    def frames(self):
        """What the other side says, until it leaves. What is no JSON text is nothing."""
        while len(head := self.rfile.read(2)) == 2 and (opcode := head[0] & 15) != CLOSE:
            size = head[1] & 127
            if size > 125:
                size = int.from_bytes(self.rfile.read(2 if size == 126 else 8), "big")
            mask, masked = self.rfile.read(4), self.rfile.read(size)
            payload = bytes(byte ^ mask[at % 4] for at, byte in enumerate(masked))
            if opcode == PING:
                self.write(PONG, payload)
            elif opcode == TEXT:
                with contextlib.suppress(ValueError):
                    yield json.loads(payload)

    def send(self, frame):
        self.write(TEXT, json.dumps(frame).encode())

    def write(self, opcode, payload):
        size = len(payload)
        if size > 0xFFFF:
            size = [127, *size.to_bytes(8, "big")]
        else:
            size = [126, *size.to_bytes(2, "big")] if size > 125 else [size]
        with self.writing, contextlib.suppress(OSError):  # It may have left.
            self.wfile.write(bytes([0x80 | opcode, *size]) + payload)

    def upgrade(self):
        self.writing = threading.Lock()
        lines = iter(lambda: self.rfile.readline().decode("latin-1").strip(), "")
        head = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        key = head.get("sec-websocket-key")
        if key is None or "origin" in head:
            self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return False
        proof = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        self.wfile.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + base64.b64encode(proof) + b"\r\n\r\n"
        )
        return True
