"""`perfsuite compare --python`: the same code in two Python environments, timed in turns on one device.

    interpreter → its packages, what differs
    collection → the test modules that cannot be imported there
    results → whether the reference computes the same values there
    rule → the change in each workload's time, with its interval
    report → table and JSON

`perfsuite.timing.alternation` lets two processes time block by block, one after the other.
"""
