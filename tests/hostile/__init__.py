"""
Hostile input: what an untrusted client, or an untrusted upstream, may send.

`ledger` is the upstream of these tests and the strict reader of replies; `cases` are the raw
requests of row P1 with the one thing each may lead to. Everything goes through real sockets.
"""
