"""The error of this package."""


class SecureError(ValueError):
    """What another party sent cannot be used: a key, a box, a share, a signature, or a list of parties."""
