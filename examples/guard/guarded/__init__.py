"""The same app with the guard."""
