"""Engines that run the app on one machine: in process, or on Flower's Ray simulation.

Import names from the modules: worker processes start before this process imports PyTorch.
"""
