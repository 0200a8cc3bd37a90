"""
The benchmark: Turnwire against controls, in one run, side by side.

On a machine that others use too, a time says little, and a ratio of two times taken a second apart
says much. So every round measures every way (no proxy, Turnwire, a plain HTTP proxy, a naive delta
proxy, nginx if it is there), in turn, and what counts are the medians of the ratios within the
rounds. The proxy under test is a process of its own with the default configuration.

    bodies      what is sent and answered (pure)
    samples     what was measured, and the statistics of it (pure)
    goals       the figures that count, what they should be, and the gate (pure)
    links       an emulated network link
    load        the upstream and the clients: C programs in `c/`, or `fallback` in Python
    children    processes: started, placed, watched, ended
    ports       those that are kept until a process takes them
    controls    the other proxies
    ways        how each way is set up
    turns, relays, tls, footprint, agents   the measurements
    report, plot   tables, JSON, the picture
    suite       what is measured when, and what is shown in the end: `main`

Start reading with `samples`, then `turns`. Nothing is imported here: the children are modules of
this package, and have to start fast.
"""
