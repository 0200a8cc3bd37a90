"""
An independent witness of the Responses API: what tests, the demo and the benchmark talk to.

The witness holds, for every turn, the full context that the model would see, whichever way it
came: whole over HTTP, or as a delta on a WebSocket connection that remembers the rest. Its
answer is a pure function of that context. So one lost, doubled, reordered or foreign item
changes that answer and every later one, and two runs of the same agent, one straight and one
through Turnwire, either agree to the last byte of text or prove that a history was damaged.

It imports nothing of the proxy's core: a mistake there can't be repeated here.

    wire       JSON in and out, and the API's errors in all their shapes
    meaning    what an item means; the rolling digest of a sequence of items
    values     text and tool arguments, grown from a digest and a JSON schema
    answers    context -> output items: an agent's tool loop, decided from the context alone
    errands    calls that a real agent can carry out without harm
    validate   what the API refuses: fields, item types, unpaired calls, doubled ids
    state      what is remembered: stored responses, and one response per connection
    events     output items -> the server events of a stream
    latency    how long the API takes, from published figures
    faults     what can go wrong, on demand
    garble     frames that nobody should send
    engine     one turn, the same for both transports: body -> events
    journal    what was seen, for tests
    chat       Chat Completions, from the same answers
    playback   a script played to a client, to whatever end
    server     HTTP and WebSocket around all of it
    echoes     how clients echo the model's items
    streams    a reader of event streams that forgives nothing
    agent      stateless clients that replay their full history

Read `meaning` first, then `engine`. A test starts with:

    async with Simulator() as simulator:
        transcript = await Agent(simulator.base_url).run(["[calls=4] Tidy up."])
"""

from proxy.simulator.agent import Agent, Reply, ReplyError, Streaming, Transcript
from proxy.simulator.answers import AnswerOptions, Calls
from proxy.simulator.echoes import EchoStyle
from proxy.simulator.latency import PRESETS, LatencyModel
from proxy.simulator.server import Simulator, SimulatorOptions, serve
from proxy.simulator.streams import StreamError

__all__ = [
    "PRESETS",
    "Agent",
    "AnswerOptions",
    "Calls",
    "EchoStyle",
    "LatencyModel",
    "Reply",
    "ReplyError",
    "Simulator",
    "SimulatorOptions",
    "StreamError",
    "Streaming",
    "Transcript",
    "serve",
]
