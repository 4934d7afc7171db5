"""A Flower app that trains one private model per hidden group of clients."""
