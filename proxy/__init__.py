"""
Turnwire: a local reverse proxy that turns stateless Responses requests into WebSocket turns.

    client body
      -> downstream.client    reads plain turns off the socket; aiohttp reads all else
      -> downstream.server    routes, limits; a turn, or passed through untouched
      -> core.plan            which chain the history continues: Continue | Start | PassThrough
      -> core.turn            one turn as a state machine: events in, commands out
      -> downstream.express   carries its commands out from within callbacks, as long as nothing
                              has to be waited for; then downstream.driver does, which can wait
      -> upstream.pool        a lease on the connection that holds the chain, or on another
      -> core.reply           server events -> SSE bytes, or one JSON body
      -> core.chains          what was sent and what came back: the head of the chain

Chat Completions take the same way. `core.chat_turn` reads their bodies as turns, `core.chat_reply`
tells the answer in chunks, and `core.chat_fields` is the table of what is translated and what not.

Who may import whom, from top to bottom (a machine checks it):

    cli > bench > demo | launcher | doctor | top > agents | app > downstream | simulator
        > upstream > observe > config > core > errors

`core` decides and does no I/O: it has no clock, no socket and no log, and its tests need no loop.
`upstream` and `downstream` carry out. `observe` watches, and nobody waits for it. `simulator` is a
Responses API of its own that judges the rest and therefore shares no code with it.

Read `core/turn.py`, then `core/plan.py`, then `downstream/driver.py`; who knows these three knows
the program. `downstream/express.py` is the driver once more, for the turns that need no waiting,
which are nearly all; it is there for speed and nothing else. The one sentence to keep in mind: the
socket is the state. Upstream remembers the last response of a conversation on the connection that
produced it, so a connection belongs to one principal and one chain for as long as that chain is
worth continuing.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("turnwire")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"
