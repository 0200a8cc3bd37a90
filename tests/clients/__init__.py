"""
Real agents, unmodified, in front of Turnwire: the conformance suite.

Every client is installed from its registry, pinned, and driven from outside as its users do. Each
row of the catalogue runs twice: straight to the simulator, and through Turnwire. Between client and
proxy a wire tap notes every byte, so that what the client sent is known first-hand; the simulator
tells what context it held. A row passes if the client's own final output is the same both ways,
every context is what the client had sent, every turn that could be a delta was one, and no
normalisation gap was counted. Nothing reaches the network meanwhile: see `isolation`.

    rows        what a client, a row and an excuse are
    npm, pip    the rows of each ecosystem
    catalogue   all rows, and the clients that can't run here with the reason
    install     pinned installs in a cache
    isolation   a network of its own for the whole run
    wiretap     a TCP relay that takes notes, and a reader of them
    harness     one row: both runs, and what they must have in common
    report      tables, for a terminal and for Markdown
    run         the command: python tests/clients/run.py --help
    drivers/    how each client is driven
"""
