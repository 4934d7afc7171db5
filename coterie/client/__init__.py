"""Client side: handlers of requests, local training, DP-SGD, privacy budget, reply cache.

Names are those of the modules: the process that Flower starts for a message imports PyTorch only if the message needs
it.
"""
