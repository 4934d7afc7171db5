"""The one error of this room."""


class DeployError(ValueError):
    """Certificates, a key or a machine that will not do; the message says which, why, and what to do."""
