"""A minimal WebSocket server in plain Python for `worker.py`: one thread per connection, JSON text frames in both
directions, answers to pings. It refuses web pages and accepts every other client on this machine."""
import base64
import contextlib
import hashlib
import json
import socketserver
import threading

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10


def listen(address, serve):
    """Prints the address and calls `serve` with each connection."""

    class Connection(Parent):
        def handle(self):
            if self.upgrade():
                serve(self)

    host, _, port = address.rpartition(":")
    with socketserver.ThreadingTCPServer((host, int(port)), Connection) as server:
        print("listening on ws://%s:%d" % server.server_address, flush=True)
        server.serve_forever()


class Parent(socketserver.StreamRequestHandler):
    # With Nagle's algorithm, the second of two frames would wait 40 ms for the peer's delayed acknowledgement.
    disable_nagle_algorithm = True

    def frames(self):
        """Yields the peer's JSON frames until it disconnects. Everything else is ignored."""
        while len(head := self.rfile.read(2)) == 2 and (opcode := head[0] & 15) != CLOSE:
            size = head[1] & 127
            if size > 125:
                size = int.from_bytes(self.rfile.read(2 if size == 126 else 8), "big")
            mask, masked = self.rfile.read(4), self.rfile.read(size)
            payload = bytes(byte ^ mask[index % 4] for index, byte in enumerate(masked))
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
        with self.writing, contextlib.suppress(OSError):  # The peer may have disconnected.
            self.wfile.write(bytes([0x80 | opcode, *size]) + payload)

    def upgrade(self):
        self.writing = threading.Lock()
        lines = iter(lambda: self.rfile.readline().decode("latin-1").strip(), "")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        key = headers.get("sec-websocket-key")
        if key is None or "origin" in headers:
            self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return False
        accept = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        self.wfile.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + base64.b64encode(accept) + b"\r\n\r\n"
        )
        return True
