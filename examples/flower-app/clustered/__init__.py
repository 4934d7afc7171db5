"""The same app with a private model for each hidden group of clients."""
