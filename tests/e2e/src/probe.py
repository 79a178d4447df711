"""Runs network steps inside a sandbox and prints the result of each as a line of JSON.

    probe.py STEPS CERTIFICATES

A step is an object; `do` names one of the functions below and the other members are its arguments.
"""

import errno
import json
import os
import random
import socket
import ssl
import struct
import sys
import threading
import time

CERTIFICATES = ""
TIMEOUT = 8
TYPES = {"A": 1, "NS": 2, "CNAME": 5, "NULL": 10, "MX": 15, "TXT": 16, "AAAA": 28, "SRV": 33, "SVCB": 64, "HTTPS": 65, "ANY": 255}


def name_of(error):
    if isinstance(error, socket.gaierror):
        known = {value: name for name, value in vars(socket).items() if name.startswith("EAI_")}
        return known.get(error.errno, str(error))
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, (TimeoutError, socket.timeout)):
        return "timeout"
    if isinstance(error, EOFError):
        return "closed"
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error))
    return repr(error)


def open_tcp(to, port, family=0, timeout=TIMEOUT):
    kind, _, _, _, address = socket.getaddrinfo(to, port, {0: 0, 4: socket.AF_INET, 6: socket.AF_INET6}[family], socket.SOCK_STREAM)[0]
    stream = socket.socket(kind, socket.SOCK_STREAM)
    stream.settimeout(timeout)
    stream.connect(address)
    return stream


def read_response(receive):
    """Reads one HTTP response: its status and its body."""
    seen = b""
    while b"\r\n\r\n" not in seen:
        piece = receive()
        if not piece:
            raise EOFError
        seen += piece
    head, body = seen.split(b"\r\n\r\n", 1)
    lines = head.decode("latin1").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    status = int(lines[0].split(" ")[1])
    length = headers.get("content-length")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = read_chunks(body, receive)
    while length is not None and len(body) < int(length) or length is None and status == 200 and headers.get("connection") == "close":
        piece = receive()
        if not piece:
            break
        body += piece
    text = body.decode("latin1")
    try:
        return {"status": status, "body": json.loads(text)}
    except ValueError:
        return {"status": status, "text": text[:4000], "length": len(text)}


def read_chunks(seen, receive):
    body = b""
    while True:
        while b"\r\n" not in seen:
            seen += receive()
        line, seen = seen.split(b"\r\n", 1)
        size = int(line.split(b";")[0], 16)
        while len(seen) < size + 2:
            seen += receive()
        body, seen = body + seen[:size], seen[size + 2 :]
        if size == 0:
            return body


def request_text(host, path, method, headers, body=""):
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode("latin1")


def http(to, port=80, host=None, path="/", method="GET", headers=(), family=0, body=""):
    stream = open_tcp(to, port, family)
    stream.sendall(request_text(host or to, path, method, headers, body))
    return read_response(lambda: stream.recv(65536))


def raw(to, port, send=(), pause=0, wait=1.0, family=0):
    """Sends pieces of bytes and collects what comes back until the end of the connection, or until `wait` is over."""
    stream = open_tcp(to, port, family)
    got, end = b"", "open"
    try:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in send:
            stream.sendall(piece.encode("latin1"))
            time.sleep(pause)
        stream.settimeout(wait)
        while True:
            piece = stream.recv(65536)
            if not piece:
                end = "closed"
                break
            got += piece
    except TimeoutError:
        pass
    except OSError as error:
        end = name_of(error)
    return {"got": got.decode("latin1")[:8000], "length": len(got), "end": end}


def hello_of(sni, alpn=()):
    """A whole ClientHello as this Python sends it."""
    context = ssl._create_unverified_context()
    if alpn:
        context.set_alpn_protocols(list(alpn))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=sni)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


def in_records(hello, size):
    """The same handshake message in records of at most this many bytes."""
    version, message = hello[1:3], hello[5:]
    pieces = [message[n : n + size] for n in range(0, len(message), size)]
    return b"".join(b"\x16" + version + struct.pack(">H", len(piece)) + piece for piece in pieces)


def padded(hello, size, kind=0x6A6A):
    """The same ClientHello with so many bytes before its other extensions, by default in one that nobody knows; see RFC 8701."""
    message = hello[9:]
    at = 2 + 32
    at += 1 + message[at]
    at += 2 + struct.unpack(">H", message[at : at + 2])[0]
    at += 1 + message[at]
    length = struct.unpack(">H", message[at : at + 2])[0]
    padding = struct.pack(">HH", kind, size) + bytes(size)
    message = message[:at] + struct.pack(">H", length + len(padding)) + padding + message[at + 2 :]
    message = b"\x01" + struct.pack(">I", len(message))[1:] + message
    return in_records(b"\x16\x03\x01\x00\x00" + message, 16384)


def tls(to, port=443, sni=None, host=None, path="/", verify=True, family=0, pieces=0, records=0, pad=0, pause=0.002, alpn=(), more_hosts=()):
    """A TLS connection to an address or name, with another name in the ClientHello and another in the request if wanted."""
    stream = open_tcp(to, port, family)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    context = ssl.create_default_context(cadata=CERTIFICATES)
    if not verify or sni is None:
        context.check_hostname = False
    if not verify:
        context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(list(alpn))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=sni)
    first = True

    def flush():
        nonlocal first
        text = outgoing.read()
        if first and text:
            first = False
            text = padded(text, pad) if pad else in_records(text, records) if records else text
            step = pieces or len(text)
            for n in range(0, len(text), step):
                stream.sendall(text[n : n + step])
                if pieces:
                    time.sleep(pause)
        elif text:
            stream.sendall(text)

    def call(work, *arguments):
        while True:
            try:
                result = work(*arguments)
                flush()
                return result
            except ssl.SSLWantReadError:
                flush()
                piece = stream.recv(65536)
                if not piece:
                    raise EOFError
                incoming.write(piece)

    call(client.do_handshake)
    result = {}
    for number, name in enumerate([host or sni or to, *more_hosts]):
        call(client.write, request_text(name, path, "GET", ()))
        found = read_response(lambda: call(client.read, 65536))
        result = found if number == 0 else {**result, f"more{number}": found}
    if verify:
        result["names"] = [value for _, value in client.getpeercert().get("subjectAltName", ())]
    return result


def hello(to, port=443, sni=None, family=0, pad=0, kind=0x6A6A, records=0, cut=None, wait=1.5):
    """Sends a ClientHello alone, or its beginning, and says whether a TLS server replied."""
    message = hello_of(sni)
    message = padded(message, pad, kind) if pad else in_records(message, records) if records else message
    if cut is not None:
        message = message[:cut]
    began = time.monotonic()
    found = raw(to, port, [message.decode("latin1")], wait=wait, family=family)
    return {"server": found["got"][:1] == "\x16", "end": found["end"], "took": time.monotonic() - began}


def resolve(name, family=0):
    began = time.monotonic()
    try:
        kind = {0: 0, 4: socket.AF_INET, 6: socket.AF_INET6}[family]
        found = sorted({entry[4][0] for entry in socket.getaddrinfo(name, None, kind, socket.SOCK_STREAM)})
        return {"addresses": found, "took": time.monotonic() - began}
    except OSError as error:
        return {"error": name_of(error), "took": time.monotonic() - began}


def question(name, kind, number=None):
    number = random.randrange(65536) if number is None else number
    labels = b"".join(bytes([len(label)]) + label.encode("latin1") for label in name.split(".") if label)
    return struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", TYPES.get(kind, kind), 1)


def read_name(message, at):
    labels, end = [], None
    while message[at]:
        if message[at] & 0xC0 == 0xC0:
            end = end or at + 2
            at = struct.unpack(">H", message[at : at + 2])[0] & 0x3FFF
            continue
        labels.append(message[at + 1 : at + 1 + message[at]].decode("latin1"))
        at += 1 + message[at]
    return ".".join(labels), end or at + 1


def read_answer(message):
    _, flags, _, count, _, _ = struct.unpack(">HHHHHH", message[:12])
    _, at = read_name(message, 12)
    at += 4
    answers = []
    for _ in range(count):
        owner, at = read_name(message, at)
        kind, _, ttl, length = struct.unpack(">HHIH", message[at : at + 10])
        at += 10
        data = message[at : at + length]
        if kind == 1:
            text = socket.inet_ntop(socket.AF_INET, data)
        elif kind == 28:
            text = socket.inet_ntop(socket.AF_INET6, data)
        elif kind == 5:
            text = read_name(message, at)[0]
        else:
            text = data.hex()
        answers.append({"owner": owner, "type": kind, "ttl": ttl, "data": text})
        at += length
    return {"code": flags & 15, "truncated": bool(flags & 0x200), "answers": answers}


def receive_exactly(receive, length):
    seen = b""
    while len(seen) < length:
        piece = receive(length - len(seen))
        if not piece:
            raise EOFError
        seen += piece
    return seen


def dns(name, type="A", server=None, tcp=False, tls=False, sni=None, port=None, timeout=4):
    """A question to a name server, by default the one of resolv.conf."""
    if server is None:
        with open("/etc/resolv.conf") as settings:
            server = next(line.split()[1] for line in settings if line.startswith("nameserver"))
    text = question(name, type)
    began = time.monotonic()
    if tcp or tls:
        stream = open_tcp(server, port or (853 if tls else 53), timeout=timeout)
        if tls:
            context = ssl.create_default_context(cadata=CERTIFICATES)
            context.check_hostname = False
            stream = context.wrap_socket(stream, server_hostname=sni)
        stream.sendall(struct.pack(">H", len(text)) + text)
        length = struct.unpack(">H", receive_exactly(stream.recv, 2))[0]
        message = receive_exactly(stream.recv, length)
    else:
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as asker:
            asker.settimeout(timeout)
            asker.connect((server, port or 53))
            asker.send(text)
            message = asker.recv(65536)
            while message[:2] != text[:2]:
                message = asker.recv(65536)
    return {**read_answer(message), "took": time.monotonic() - began, "server": server}


def doh(to, host, name, type="A", sni=None):
    """A question over HTTPS."""
    stream = open_tcp(to, 443)
    context = ssl.create_default_context(cadata=CERTIFICATES)
    context.check_hostname = False
    stream = context.wrap_socket(stream, server_hostname=sni or host)
    text = question(name, type, 0)
    head = f"POST /dns-query HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/dns-message\r\nContent-Length: {len(text)}\r\n\r\n"
    stream.sendall(head.encode() + text)
    seen = b""
    while b"\r\n\r\n" not in seen:
        piece = stream.recv(65536)
        if not piece:
            raise EOFError
        seen += piece
    head, body = seen.split(b"\r\n\r\n", 1)
    return read_answer(body or stream.recv(65536))


def udp(to, port, text="x", family=0, wait=2):
    kind, _, _, _, address = socket.getaddrinfo(to, port, {0: 0, 4: socket.AF_INET, 6: socket.AF_INET6}[family], socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as sender:
        sender.settimeout(wait)
        sender.connect(address)
        began = time.monotonic()
        sender.send(text.encode("latin1"))
        return {"got": sender.recv(65536).decode("latin1"), "took": time.monotonic() - began}


def ping(to, wait=2):
    """An echo request through a socket for pings, or a raw one."""
    family, protocol = (socket.AF_INET6, socket.IPPROTO_ICMPV6) if ":" in to else (socket.AF_INET, socket.IPPROTO_ICMP)
    kind = 128 if ":" in to else 8
    text = struct.pack(">BBHHH", kind, 0, 0, 1, 1)
    try:
        sender = socket.socket(family, socket.SOCK_DGRAM, protocol)
    except OSError:
        sender = socket.socket(family, socket.SOCK_RAW, protocol)
        text = struct.pack(">BBHHH", kind, 0, 0xF7FD, 1, 1)
    with sender:
        sender.settimeout(wait)
        sender.sendto(text, (to, 0))
        answer, peer = sender.recvfrom(2048)
        if sender.type == socket.SOCK_RAW and family == socket.AF_INET:
            answer = answer[4 * (answer[0] & 15) :]
        return {"type": answer[0], "peer": peer[0]}


def tunnel(to, port, target, request):
    """CONNECT through an HTTP proxy, then a request in the tunnel."""
    stream = open_tcp(to, port)
    stream.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    found = read_response(lambda: stream.recv(65536))
    if found["status"] != 200:
        return found
    stream.sendall(request.encode("latin1"))
    return {"inside": read_response(lambda: stream.recv(65536))}


def socks(to, port, target, target_port, request, user=None, password=None):
    """A request through a SOCKS5 proxy that resolves the name."""
    stream = open_tcp(to, port)
    stream.sendall(b"\x05\x01\x00")
    receive_exactly(stream.recv, 2)
    stream.sendall(b"\x05\x01\x00\x03" + bytes([len(target)]) + target.encode() + struct.pack(">H", target_port))
    code = receive_exactly(stream.recv, 10)[1]
    if code:
        return {"refused": code}
    stream.sendall(request.encode("latin1"))
    return read_response(lambda: stream.recv(65536))


def edit(path, text):
    """Appends to a file such as /etc/hosts."""
    with open(path, "a") as file:
        file.write(text)
    return {}


def write(path, text):
    with open(path, "w") as file:
        file.write(text)
    return {}


def wait(seconds):
    time.sleep(seconds)
    return {}


def ports_of_listeners():
    """The ports at which something listens inside, from /proc."""
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for line in list(lines)[1:]:
                words = line.split()
                if words[3] == "0A":
                    found.add(int(words[1].rsplit(":", 1)[1], 16))
    return {"ports": sorted(found)}


def listen(port, host="::"):
    """Listens on a port of its own and says what it gets when it connects to the world on it."""
    with socket.socket(socket.AF_INET6) as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taker.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        taker.bind((host, port))
        taker.listen(64)
    return {"bound": port}


def own_address(family=4):
    """The source address of this sandbox's packets."""
    kind, to = (socket.AF_INET, "93.184.216.34") if family == 4 else (socket.AF_INET6, "2606:2800:220:1::34")
    with socket.socket(kind, socket.SOCK_DGRAM) as sender:
        sender.connect((to, 53))
        return {"address": sender.getsockname()[0]}


def udp_ports():
    """The ports at which datagrams are received inside, from /proc."""
    found = set()
    for table in ("udp", "udp6"):
        with open(f"/proc/net/{table}") as lines:
            found |= {int(line.split()[1].rsplit(":", 1)[1], 16) for line in list(lines)[1:]}
    return {"ports": sorted(found)}


def bind_udp(port, reuse=True):
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as taker:
        if reuse:
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taker.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        taker.bind(("::", port))
    return {"bound": port}


def many(to, port, count, send="", hold=0, threads=32):
    """Opens many connections at once, keeps them and says how many succeeded."""
    streams, errors = [], {}
    left = iter(range(count))
    lock = threading.Lock()

    def work():
        while True:
            with lock:
                if next(left, None) is None:
                    return
            try:
                stream = open_tcp(to, port)
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
                if send:
                    stream.sendall(send.encode("latin1"))
                with lock:
                    streams.append(stream)
            except OSError as error:
                with lock:
                    errors[name_of(error)] = errors.get(name_of(error), 0) + 1

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if hold:
        print(json.dumps({"holding": len(streams), "errors": errors}), flush=True)
        time.sleep(hold)
    alive = 0
    for stream in streams:
        stream.setblocking(False)
        try:
            alive += bool(stream.recv(1))
        except BlockingIOError:
            alive += 1
        except OSError:
            pass
    return {"opened": len(streams), "alive": alive, "errors": errors}


def flood(name, count, server=None):
    """Many questions for names that do not repeat; then one that counts."""
    if server is None:
        with open("/etc/resolv.conf") as settings:
            server = next(line.split()[1] for line in settings if line.startswith("nameserver"))
    sent, answered = 0, 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.setblocking(False)
        asker.connect((server, 53))
        for number in range(count):
            try:
                asker.send(question(f"n{number}.{name}", "A"))
                sent += 1
            except OSError:
                pass
            try:
                while asker.recv(2048):
                    answered += 1
            except OSError:
                pass
    return {"sent": sent, "answered": answered}


def main():
    global CERTIFICATES
    CERTIFICATES = sys.argv[2]
    for step in json.loads(sys.argv[1]):
        try:
            result = globals()[step.pop("do")](**step)
        except Exception as error:
            result = {"error": name_of(error)}
        print(json.dumps(result), flush=True)


main()
