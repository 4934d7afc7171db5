"""Deployment: certificates, the app bundle, Flower's programs, trials, backups, and their commands."""
