"""The one error of this room."""


class DeployError(ValueError):
    """Certificates, a key or a machine that cannot be used; the message states which, why, and what to do."""
