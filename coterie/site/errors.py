"""The error of this package."""


class DeployError(ValueError):
    """A certificate, key or machine cannot be used; the message states which, why, and what to do."""
