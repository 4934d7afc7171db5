"""A guard for Flower apps that are not Coterie's: it charges, limits and certifies their own DP training.

At a site, :class:`Guard` is a Flower client mod. While an app trains with Opacus, the guard draws the batches, clips
and adds the noise itself, charges the site's ledger before each epoch, refuses what exceeds the site's budget, and
sends nothing but the parameters that came out of these steps. At the server, :class:`GuardedServerApp` keeps the ledger
of the run and writes its certificate. The guarantee and its proof: docs/guard.md.
"""

from coterie.guard.guarantee import certificate
from coterie.guard.mod import REFUSAL, Guard
from coterie.guard.server import GuardedServerApp
from coterie.guard.terms import Declared, GuardError, Terms

__all__ = ["REFUSAL", "Declared", "Guard", "GuardError", "GuardedServerApp", "Terms", "certificate"]
