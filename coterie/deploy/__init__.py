"""Deployment of clients and servers: certificates and keys, the app bundle, and client start-up.

A ClientApp imports the node configuration, and no library for certificates: names are those of the modules.
"""
