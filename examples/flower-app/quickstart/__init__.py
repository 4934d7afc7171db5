"""A Flower app as in Flower's quickstart: federated averaging of a small PyTorch model."""
