"""Floor 1: the arithmetic. Each kernel stands beside a torch twin with the same law; one public name picks.

Every row's result has the same bits whatever rows stand beside it, for the kernel and for the twin.
"""
