"""Mailboxes: messages between processes arrive once and in order as long as both sides live.

`mailbox` has the ZeroMQ sockets, `inbox` one that receives. `reliable_channel` sends again what a
cut connection loses, and `framing` cuts large messages (both pure). `send_effects` is what the
cores of actors want sent.

Offers: inbox, mailbox, send_effects.
Imports: config, errors, own_log, messages.
"""
