"""The supervisor's pure core: the wanted and the present members of the cluster. Pure.

`fleet` decides what starts and ends, `failure_detector` which member has stopped working, `lease`
when an unreachable instance must have ended itself. `core` joins them with messages. The shell is
in `runtime.supervisor`.

Offers: core, failure_detector, fleet, lease.
Imports: config, errors, messages, messaging, types.
"""
