r"""
Raw HTTP/1.1 streams that two parsers might read differently, and what each must lead to.

Each case is what a connection carries, for one target: `{target}` is put in. After it the test
sends `LAST`. A case is either refused from the first fault on (`Refused`: one 4xx, nothing of it
upstream, and unless it `stays` the connection closed), or it is requests that are served, in order
and with exactly this text (`Served`). There is no third way. A few may go either way, by whether
the fault came in one read with what was good before it. RFC numbers are those of the rule: 9112
unless another is named.

`SMUGGLED` stands where an attacker puts the request that only the second parser sees. It must not
reach upstream in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

SMUGGLED_TARGET = "/v1/smuggled"
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nHost: localhost\r\nX: x\r\n\r\n"
TEXT = "ping"
BODY = b'{"model":"m","store":false,"input":"ping"}'
SIZE = len(BODY)
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (SIZE, BODY)
POST = b"POST {target} HTTP/1.1\r\n"
HOST = b"Host: localhost\r\nAuthorization: Bearer sk-asker-000000\r\n"


@dataclass(frozen=True)
class Refused:
    """
    Nothing of it is served but `first` requests before the fault.

    It `stays` where the framing is beyond doubt and only the request is refused.
    """

    first: int = 0
    stays: bool = False


@dataclass(frozen=True)
class Served:
    """`count` requests are served; the connection `closes` before what follows them."""

    count: int = 1
    closes: bool = False
    interim: tuple[int, ...] = ()


Outcome = Refused | Served


@dataclass(frozen=True)
class Case:
    """One stream of bytes, and what it must lead to; some lead there by a deadline only."""

    name: str
    raw: bytes
    outcome: Outcome
    or_else: Outcome | None = None

    @property
    def waits(self) -> bool:
        """Whether the stream announces more than it has."""
        return self.name in _ANNOUNCE_MORE

    def stream(self, target: str) -> bytes:
        """Return the bytes for a target."""
        return self.raw.replace(b"{target}", target.encode())


def post(*fields: bytes, body: bytes = BODY, host: bytes = HOST, line: bytes = POST) -> bytes:
    """Spell a POST with these field lines, each without its end."""
    return line + host + b"".join(each + b"\r\n" for each in fields) + b"\r\n" + body


def sized(*fields: bytes, host: bytes = HOST, line: bytes = POST) -> bytes:
    """Spell a POST with a Content-Length and further field lines."""
    return post(b"Content-Length: %d" % SIZE, *fields, host=host, line=line)


def chunked(body: bytes, *fields: bytes) -> bytes:
    """Spell a POST in chunks, which are spelled already."""
    return post(b"Transfer-Encoding: chunked", *fields, body=body)


def _lengths() -> list[Case]:
    size = b"%d" % SIZE
    both = b"0\r\n\r\n" + SMUGGLED
    bad = {
        "plus": b"+%b" % size,
        "minus": b"-%b" % size,
        "hex": b"0x%x" % SIZE,
        "two numbers": size + b" " + size,
        "list": size + b", " + size,
        "other list": size + b", 0",
        "trailing comma": size + b",",
        "exponent": b"4e1",
        "underscore": b"4_2",
        "fraction": size + b".0",
        "beyond 64 bits": b"%d" % (2**64 + SIZE),
        "beyond 63 bits": b"%d" % (2**63 + SIZE),
        "empty": b"",
        "vertical tab": b"\x0b" + size,
        "no number": b"many",
        "other digits": "\u0664\u0662".encode(),
        "quoted": b'"%b"' % size,
    }
    cases = [
        Case(f"length: {name}", post(b"Content-Length: " + value), Refused())
        for name, value in bad.items()
    ]
    return [
        *cases,
        Case("length twice", sized(b"Content-Length: %d" % SIZE), Refused()),
        Case("two lengths", post(b"Content-Length: 0", b"Content-Length: %d" % SIZE), Refused()),
        Case("two lengths, other case", sized(b"content-length: 0"), Refused()),
        Case(
            "length, then chunked (6.3)",
            post(b"Content-Length: %d" % SIZE, b"Transfer-Encoding: chunked", body=both),
            Refused(),
        ),
        Case(
            "chunked, then length (6.3)",
            post(b"Transfer-Encoding: chunked", b"Content-Length: 4", body=both),
            Refused(),
        ),
        Case("blank before the colon (5.1)", post(b"Content-Length : %d" % SIZE), Refused()),
        Case("tab before the colon", post(b"Content-Length\t: %d" % SIZE), Refused()),
        Case("blanks around the value", post(b"Content-Length:   %d \t" % SIZE), Served()),
        Case("leading zeros", post(b"Content-Length: 000%d" % SIZE), Served()),
        Case("no blank", post(b"Content-Length:%d" % SIZE), Served()),
        Case("name in capitals", post(b"CONTENT-LENGTH: %d" % SIZE), Served()),
    ]


def _codings() -> list[Case]:
    bad = {
        "unknown": b"xchunked",
        "identity": b"identity",
        "chunked, identity": b"chunked, identity",
        "chunked twice": b"chunked, chunked",
        "quoted": b'"chunked"',
        "with a parameter": b"chunked;q=1",
        "vertical tab": b"\x0bchunked",
        "null byte": b"chunked\x00",
        "not last": b"chunked, gzip",
        "gzip below": b"gzip, chunked",
        "deflate": b"deflate",
        "empty": b"",
        "two words": b"chunked chunked",
        "dotless": "chun\u212aed".encode(),
    }
    cases = [
        Case(
            f"coding: {name}",
            post(b"Transfer-Encoding: " + value, body=CHUNKED + SMUGGLED),
            Refused(),
        )
        for name, value in bad.items()
    ]
    name = b"Transfer-Encoding"
    return [
        *cases,
        Case("coding twice", chunked(CHUNKED, b"Transfer-Encoding: chunked"), Refused()),
        Case("two codings", chunked(CHUNKED, b"Transfer-Encoding: identity"), Refused()),
        Case("blank before its colon", post(name + b" : chunked", body=CHUNKED), Refused()),
        Case("its value folded (5.2)", post(name + b":\r\n chunked", body=CHUNKED), Refused()),
        Case("hidden by a bare LF", post(b"X: y\n" + name + b": chunked", body=CHUNKED), Refused()),
        Case("hidden by a bare CR", post(b"X: y\r" + name + b": chunked", body=CHUNKED), Refused()),
        Case("in capitals (4)", post(b"TRANSFER-ENCODING: CHUNKED", body=CHUNKED), Served()),
        Case(
            "chunked under HTTP/1.0 (6.1)",
            post(name + b": chunked", body=CHUNKED, line=b"POST {target} HTTP/1.0\r\n"),
            Refused(),
        ),
    ]


def _chunks() -> list[Case]:
    size, last = b"%x" % SIZE, b"0\r\n\r\n"
    data = BODY + b"\r\n"
    bad = {
        "plus": b"+" + size + b"\r\n" + data + last,
        "minus": b"-" + size + b"\r\n" + data + last,
        "hex mark": b"0x" + size + b"\r\n" + data + last,
        "blank before": b" " + size + b"\r\n" + data + last,
        "blank after": size + b" \r\n" + data + last,
        "underscore": size[:1] + b"_" + size[1:] + b"\r\n" + data + last,
        "no size": b"\r\n" + data + last,
        "size, bare LF": size + b"\n" + data + last,
        "size, bare CR": size + b"\r" + data + last,
        "size, two CR": size + b"\r\r\n" + data + last,
        "data, bare LF": size + b"\r\n" + BODY + b"\n" + last,
        "data, nothing": size + b"\r\n" + BODY + last,
        "data too long": size + b"\r\n" + BODY + b"XX\r\n" + last,
        "beyond 64 bits": b"1" + b"0" * 16 + size + b"\r\n" + data + last,
        "extension, bare LF": size + b";a=b\n" + data + last,
        "extension, bare CR": size + b";a=b\rc\r\n" + data + last,
        "extension, null byte": size + b";a=\x00\r\n" + data + last,
        "last, bare LF": size + b"\r\n" + data + b"0\n\n",
        "end, bare LF": size + b"\r\n" + data + b"0\r\n\n",
        "trailer is a request": size + b"\r\n" + data + b"0\r\n" + SMUGGLED,
        "trailer without colon": size + b"\r\n" + data + b"0\r\nnothing\r\n\r\n",
        "trailer with a null byte": size + b"\r\n" + data + b"0\r\nX: \x00\r\n\r\n",
        "trailer, folded": size + b"\r\n" + data + b"0\r\nX: a\r\n b\r\n\r\n",
    }
    ones = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + last
    good = {
        "whole": CHUNKED,
        "bytes one by one": ones,
        "capitals": size.upper() + b"\r\n" + data + last,
        "leading zeros": b"000" + size + b"\r\n" + data + b"000\r\n\r\n",
        "extension (7.1.1)": size + b';a=b;c="d"\r\n' + data + b"0;e\r\n\r\n",
        "a trailer (7.1.2)": size + b"\r\n" + data + b"0\r\nX: y\r\n\r\n",
    }
    # All of the body is here by then, so it may have been served; what follows never is.
    odd = {
        "trailer names a host": size + b"\r\n" + data + b"0\r\nHost: evil.example\r\n\r\n",
        "trailer names a length": size + b"\r\n" + data + b"0\r\nContent-Length: 3\r\n\r\n",
    }
    return [
        *(Case(f"chunk: {name}", chunked(raw), Refused()) for name, raw in bad.items()),
        *(Case(f"chunk: {name}", chunked(raw), Refused(), Refused(1)) for name, raw in odd.items()),
        *(Case(f"chunks: {name}", chunked(raw), Served()) for name, raw in good.items()),
    ]


def _lines() -> list[Case]:
    bad = {
        "tabs": b"POST\t{target}\tHTTP/1.1\r\n",
        "blank before": b" POST {target} HTTP/1.1\r\n",
        "blank in the target": b"POST {target} x HTTP/1.1\r\n",
        "version 1.2": b"POST {target} HTTP/1.2\r\n",
        "version 2.0": b"POST {target} HTTP/2.0\r\n",
        "version 0.9": b"POST {target} HTTP/0.9\r\n",
        "no version": b"POST {target}\r\n",
        "half a version": b"POST {target} HTTP/1\r\n",
        "version too long": b"POST {target} HTTP/1.10\r\n",
        "version in small letters": b"POST {target} http/1.1\r\n",
        "another protocol": b"POST {target} ICE/1.0\r\n",
        "method in small letters (9110 9.1)": b"post {target} HTTP/1.1\r\n",
        "method with a null byte": b"PO\x00ST {target} HTTP/1.1\r\n",
        "no method": b"{target} HTTP/1.1\r\n",
        "no target": b"POST HTTP/1.1\r\n",
        "target with a null byte": b"POST {target}\x00 HTTP/1.1\r\n",
        "target with a bare CR": b"POST {target}\r HTTP/1.1\r\n",
        "target with a control": b"POST {target}\x7f HTTP/1.1\r\n",
        "relative target": b"POST v1/responses HTTP/1.1\r\n",
        "bare LF (2.2)": b"POST {target} HTTP/1.1\n",
        "bare CR": b"POST {target} HTTP/1.1\r",
        "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "too long": b"POST {target}?" + b"x" * 40_000 + b" HTTP/1.1\r\n",
    }
    good = {
        "empty line before (2.2)": b"\r\n" + POST,
        "two blanks (3)": b"POST  {target} HTTP/1.1\r\n",
        "absolute form (3.2.2)": b"POST http://localhost{target} HTTP/1.1\r\n",
    }
    return [
        *(Case(f"line: {name}", sized(line=raw), Refused()) for name, raw in bad.items()),
        *(Case(f"line: {name}", sized(line=raw), Served()) for name, raw in good.items()),
    ]


def _fields() -> list[Case]:
    bad = {
        "no colon": b"nothing",
        "no name": b": x",
        "blank in the name": b"X Y: z",
        "null byte in the name": b"X\x00: z",
        "parenthesis in the name": b"X(y): z",
        "not ASCII in the name": b"X\xe9: z",
        "null byte in the value": b"X: a\x00b",
        "bare CR in the value": b"X: a\rb",
        "bare LF in the value": b"X: a\nb",
        "control in the value": b"X: a\x01b",
        "folded (5.2)": b"X: a\r\n b",
        "folded by a tab": b"X: a\r\n\tb",
        "too long": b"X: " + b"x" * 40_000,
        "too many": b"\r\n".join(b"X-%d: x" % number for number in range(20_000)),
        "a second User-Agent": b"User-Agent: one\r\nUser-Agent: two",
        "a second Content-Type": b"Content-Type: text/plain\r\nContent-Type: application/json",
        "a second Host": b"Host: localhost",
        "another Host": b"Host: evil.example",
    }
    key = b"Authorization: Bearer sk-asker-000000\r\n"
    no_hosts = {
        "none": key,
        "folded": b"Host:\r\n localhost\r\n" + key,
        "blank before it": b" Host: localhost\r\n" + key,
    }
    other_hosts = {
        "empty": b"Host: \r\n" + key,
        "another": b"Host: evil.example\r\n" + key,
        "two in one": b"Host: localhost, evil.example\r\n" + key,
        "with a user": b"Host: localhost@evil.example\r\n" + key,
        "with a path": b"Host: localhost/evil\r\n" + key,
        "with a blank": b"Host: local host\r\n" + key,
        "a name that begins alike": b"Host: localhost.evil.example\r\n" + key,
    }
    good = {
        "tab in the value": b"X: a\tb",
        "empty value": b"X:",
        "odd name": b"!#$%&'*+-.^_`|~: 1",
        "not ASCII in the value": b"X: \xe9\xff",
        "an underscored length": b"Content_Length: 0",
        "options that name framing": b"Connection: Content-Length, Host",
        "a second Accept": b"Accept: */*\r\naccept: */*",
        "a hundred and more": b"\r\n".join(b"X-%d: x" % number for number in range(110)),
        "a blank at the end": b"X: a \t",
        "a method to override": b"X-HTTP-Method-Override: DELETE",
        "another target": b"X-Original-URL: /v1/smuggled\r\nX-Rewrite-URL: /v1/smuggled",
    }
    return [
        *(Case(f"field: {name}", sized(raw), Refused()) for name, raw in bad.items()),
        *(Case(f"host: {name}", sized(host=raw), Refused()) for name, raw in no_hosts.items()),
        *(
            Case(f"host: {name}", sized(host=raw), Refused(stays=True))
            for name, raw in other_hosts.items()
        ),
        *(Case(f"field: {name}", sized(raw), Served()) for name, raw in good.items()),
    ]


def _sequences() -> list[Case]:
    whole = sized()
    longer = post(b"Content-Length: %d" % SIZE, body=BODY + b"GARBAGE\r\n\r\n" + SMUGGLED)
    return [
        Case("one", whole, Served()),
        Case("two at once", whole * 2, Served(2)),
        Case("many at once", whole * 20, Served(20)),
        Case("chunked, then sized", chunked(CHUNKED) + whole, Served(2)),
        Case("sized, then no HTTP", whole + b"NO HTTP\r\n\r\n" + SMUGGLED, Refused(1), Refused()),
        Case("a body longer than it says", longer, Refused(1), Refused()),
        Case(
            "more after the last (9.6)",
            sized(b"Connection: close") + SMUGGLED,
            Served(closes=True),
            Refused(),
        ),
        Case(
            "more after HTTP/1.0",
            sized(line=b"POST {target} HTTP/1.0\r\n"),
            Served(closes=True),
            Refused(),
        ),
        Case(
            "an upgrade nobody needs (9110 7.8)",
            sized(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c"),
            Served(),
            Served(closes=True),
        ),
        Case("asked to wait (9110 10.1.1)", sized(b"Expect: 100-continue"), Served(interim=(100,))),
        Case("asked in capitals", sized(b"EXPECT: 100-Continue"), Served(interim=(100,))),
        Case("asked to do magic", sized(b"Expect: magic"), Refused(stays=True)),
        Case(
            "a body shorter than it says",
            post(b"Content-Length: %d" % (SIZE + 500), body=BODY + SMUGGLED),
            Refused(),
        ),
        Case("a body that never comes", post(b"Content-Length: 5000", body=b""), Refused()),
        Case("a chunk that never ends", chunked(b"fff\r\n" + BODY), Refused()),
        Case("a tunnel", b"CONNECT evil:443 HTTP/1.1\r\n" + HOST + b"\r\n", Refused()),
    ]


_ANNOUNCE_MORE = {
    "length: beyond 63 bits",
    "a body shorter than it says",
    "a body that never comes",
    "a chunk that never ends",
}

CASES = [*_lengths(), *_codings(), *_chunks(), *_lines(), *_fields(), *_sequences()]
