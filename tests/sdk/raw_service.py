"""A service for tests of the proxy: it sends, byte for byte, what its path asks for.

It runs inside a sandbox and needs only Python. Port 8001 answers on IPv6 alone."""

import base64
import hashlib
import socket
import struct
import threading


def head_of(stream):
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = stream.read(1)
        if not byte:
            return None
        head += byte
    return head


def chunks_of(stream):
    while size := int(stream.readline().split(b";")[0], 16):
        yield stream.read(size)
        stream.readline()
    trailers = b""
    while (line := stream.readline()) not in (b"\r\n", b""):
        trailers += line
    yield trailers


def whole(status, body, *headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def handshake(connection, head):
    key = [line for line in head.decode().split("\r\n") if line.lower().startswith("sec-websocket-key:")][0]
    key = key.split(":")[1].strip() + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
    connection.sendall(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        + f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
    )


def serve(connection):
    stream = connection.makefile("rb")
    head = head_of(stream)
    if head is None:
        return
    path = head.split(b" ")[1].decode()
    say = connection.sendall
    if path == "/old":
        say(b"HTTP/1.0 200 OK\r\nX-Old: yes\r\n\r\nto the end")
    elif path == "/rubbish":
        say(b"this is no HTTP at all\r\n\r\n")
    elif path == "/silent":
        stream.read()
    elif path == "/half":
        say(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf.")
    elif path == "/bad-chunk":
        say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ngood\r\nnot a size\r\n")
    elif path == "/early":
        # It closes with the body unread, so the kernel resets the connection.
        say(whole("413 Too Large", b"no more", "Connection: close"))
    elif path == "/no-continue":
        say(whole("417 Expectation Failed", b"not wanted"))
    elif path == "/continue":
        say(b"HTTP/1.1 100 Continue\r\n\r\n")
        say(whole("200 OK", stream.read(4)))
    elif path == "/trailers":
        say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n4\r\nbody\r\n0\r\nX-Sum: 42\r\n\r\n")
    elif path == "/hop":
        say(
            whole(
                "200 OK", b"", "Connection: X-Private, close", "X-Private: 1", "Keep-Alive: timeout=5", "X-Public: 1",
                "X-Twice: a", "X-Twice: b", "Clear-Site-Data: *", "Alt-Svc: h3=\":1\"",
            )
        )
    elif path == "/head":
        say(whole("200 OK", head, "Content-Type: text/plain"))
    elif path == "/upload":
        total, trailers = 0, b""
        for chunk in chunks_of(stream):
            total, trailers = total + len(chunk), chunk
        total -= len(trailers)
        say(whole("200 OK", f"{total} {trailers.decode().strip()}".encode()))
    elif path == "/echo":
        say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for chunk in chunks_of(stream):
            say(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
    elif path.startswith("/to/"):
        say(whole("302 Found", b"", "Location: " + path.removeprefix("/to/")))
    elif path.startswith("/zeros/"):
        left = int(path.rsplit("/", 1)[1])
        say(f"HTTP/1.1 200 OK\r\nContent-Length: {left}\r\n\r\n".encode())
        while left:
            piece = bytes(min(left, 1 << 20))
            say(piece)
            left -= len(piece)
    elif path.startswith("/close/"):
        handshake(connection, head)
        say(b"\x88\x04" + struct.pack(">H", int(path.rsplit("/", 1)[1])) + b"ok")
        stream.read(1)
    elif path == "/vanish":
        handshake(connection, head)
        say(b"\x81\x05hello")
    elif path == "/told":
        handshake(connection, head)
        head, mask = stream.read(2), stream.read(4)
        code = bytes(byte ^ mask[i] for i, byte in enumerate(stream.read(head[1] & 127)[:2]))
        print("closed with", *struct.unpack(">H", code), flush=True)
    else:
        say(whole("200 OK", path.encode()))


def meet(connection):
    try:
        serve(connection)
    except OSError:
        pass
    connection.close()


def listener(family, address, port):
    listener = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(64)
    return listener


def answer(listener):
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=meet, args=(connection,), daemon=True).start()


six, four = listener(socket.AF_INET6, "::1", 8001), listener(socket.AF_INET, "127.0.0.1", 8002)
threading.Thread(target=answer, args=(six,), daemon=True).start()
print("ready", flush=True)
answer(four)
