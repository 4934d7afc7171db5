"""Client side: handlers of requests, local training, DP-SGD, privacy budget, reply cache; apps of others in clusters.

Other names are those of the modules: the process that Flower starts for a message imports PyTorch only if the message
needs it.
"""

from coterie.client.clustered import ClusteredClientApp

__all__ = ["ClusteredClientApp"]
