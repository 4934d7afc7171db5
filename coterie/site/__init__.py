"""What an owner consents to, and who may ask: node configuration, policy, roster, signed requests, operator's keys.

A ClientApp imports the node configuration, and no library for certificates: names are those of the modules.
"""
