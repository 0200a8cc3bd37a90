"""
Long trials of Turnwire as a process: faults by the ten thousand, an hour of soak, crowds.

    python tests/campaign/run.py faults        the campaign: 100,000 turns, 20,000 faults, ~25 min
    python tests/campaign/run.py soak          an hour of traffic; memory, descriptors, tasks
    python tests/campaign/run.py crowd         1,000 conversations at once
    python tests/campaign/run.py report        REPORT.md from the results

Every trial runs the program itself, in a process of its own (`process`), in front of the simulator;
the simulator, the clients and the network between them (`toxics`) are in ours. What it finds goes
into `results.json` under the trial's name, and from there into REPORT.md.

    ledger      what must not happen, and how often it did: the judge of all trials
    clients     agents that leave, repeat themselves, fork, edit and share histories
    menu        what can go wrong upstream, drawn at random; each with its row of the catalogue
    saboteur    what can go wrong with the network, at random moments
    rounds      the campaign: a thousand turns at a time, each with another configuration
    soak, crowd, flood
    catalogue   the rows of the catalogue, each with its proof or why it does not apply
"""
