"""Engines that run an app on one machine: in process, any ClientApp or Coterie's own; or Coterie's on Ray.

Import other names from the modules: worker processes start before this process imports PyTorch.
"""

from coterie.engine.nodes import InProcessGrid

__all__ = ["InProcessGrid"]
