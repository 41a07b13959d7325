"""Virtual time: the timeline, the nodes, and the network with its mailboxes.

Offers: mailboxes, network, nodes, settings, timeline.
Imports: config, engine.emulated, messages, messaging, policy, supervisor.
"""
