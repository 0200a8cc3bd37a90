"""
What an exception of a connection means: the same answer for aiohttp, websockets and sockets.

Each library wraps what went wrong in exceptions of its own, so the whole chain of causes is looked
at, and the most telling one wins. A refusal by a proxy comes before everything else: behind it
nothing can be told of the upstream.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from websockets.exceptions import InvalidProxy, InvalidProxyStatus, ProxyError

from proxy.doctor.findings import Check, Code, Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROXY_REMEDY = (
    "let the proxy pass this host, with CONNECT, or name the host in NO_PROXY if it may be reached"
    " without"
)


@dataclass(frozen=True, slots=True)
class Cause:
    """What went wrong, in words, and what to do."""

    code: Code
    fact: str
    remedy: str

    def finding(self, check: Check) -> Finding:
        """Make a failed check of it."""
        return Finding(check, Verdict.FAIL, self.code, self.fact, self.remedy)


def cause_of(error: BaseException, proxy: str | None) -> Cause:
    """Say what `error` means; `proxy` is the proxy that was on the way, without credentials."""
    chain = list(_chain(error))
    # Where there is a proxy, it is the proxy's name that did not resolve.
    explanations = (_proxy, _certificate, _tls) if proxy else (_proxy, _name, _certificate, _tls)
    for explain in explanations:
        for each in chain:
            if (cause := explain(each)) is not None:
                return cause
    if proxy is not None and not any(isinstance(each, TimeoutError) for each in chain):
        fact = f"the proxy {proxy} can't be reached, or broke the connection"
        return Cause(Code.PROXY_IN_THE_WAY, fact, "start it, or take it out of the environment")
    return _unreachable(chain, f", through the proxy {proxy}" if proxy else "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Give an exception, its causes, and the errors that aiohttp carries inside its own."""
    seen: list[BaseException | None] = [None]
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop(0)
        if each is None or each in seen:
            continue
        seen.append(each)
        yield each
        inner = (getattr(each, "os_error", None), getattr(each, "certificate_error", None))
        todo += [*inner, each.__cause__, each.__context__]


def _proxy(error: BaseException) -> Cause | None:
    if isinstance(error, aiohttp.ClientHttpProxyError):
        fact = f"the proxy refused to connect (status {error.status})"
    elif isinstance(error, InvalidProxyStatus):
        fact = f"the proxy refused to connect (status {error.response.status_code})"
    elif isinstance(error, aiohttp.ClientProxyConnectionError):
        fact = "the proxy can't be reached"
    elif isinstance(error, InvalidProxy):
        fact = "the environment's proxy is none that can be used"
    elif isinstance(error, ProxyError):
        fact = "the proxy does not answer as a proxy"
    elif isinstance(error, ImportError):
        fact = "a SOCKS proxy needs a package that is not installed"
        return Cause(Code.PROXY_IN_THE_WAY, fact, "pip install python-socks")
    else:
        return None
    return Cause(Code.PROXY_IN_THE_WAY, fact, _PROXY_REMEDY)


def _name(error: BaseException) -> Cause | None:
    if not isinstance(error, socket.gaierror | aiohttp.ClientConnectorDNSError):
        return None
    return Cause(
        Code.DNS_FAILED,
        "the host name does not resolve",
        "check the spelling of `upstream`, then this machine's DNS (in a container: its own)",
    )


def _certificate(error: BaseException) -> Cause | None:
    if not isinstance(error, ssl.SSLCertVerificationError) or not hasattr(error, "verify_message"):
        return None  # aiohttp's own exception of that kind has no words, the one inside has
    return Cause(
        Code.TLS_FAILED,
        f"its certificate is not valid here: {error.verify_message}",
        "if a company's proxy signs in between, name its authority in SSL_CERT_FILE; if the"
        " certificate is said to be too old or too new, check the clock; else check `upstream`",
    )


def _tls(error: BaseException) -> Cause | None:
    if not isinstance(error, ssl.SSLError):
        return None
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        remedy = "what listens there speaks no TLS: is it http:// rather than https://?"
    else:
        remedy = "look for what breaks TLS on the way (a firewall, an old proxy)"
    return Cause(Code.TLS_FAILED, f"the TLS handshake failed: {error.reason}", remedy)


def _unreachable(chain: list[BaseException], way: str) -> Cause:
    if any(isinstance(each, ConnectionRefusedError) for each in chain):
        fact, remedy = "the connection was refused", "check host and port of `upstream`"
    elif any(isinstance(each, TimeoutError) for each in chain):
        fact, remedy = (
            f"no answer in time{way}",
            "check the network: a firewall mostly drops silently",
        )
    else:
        fact = f"the connection broke ({type(chain[-1]).__name__})"
        remedy = "check that `upstream` names the API, and what stands in between"
    return Cause(Code.UNREACHABLE, fact, remedy)
