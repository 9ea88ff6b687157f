"""``lossycoll plan-threshold``: a threshold for DropCompute from recorded compute times.

``command`` has the options, ``prediction`` what the times predict, ``text`` and ``plot`` how it is
shown.
"""
