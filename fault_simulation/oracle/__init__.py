"""The oracle: what clients asked for and received, and what must hold after each event and in the
end.

Offers: checkers, fleet_checks, ledger, replica_oracle, stream_ledger, token_oracle.
Imports: engine.emulated, fault_simulation.virtual, frontend.requests, frontend.resumable, instance,
    scheduler, supervisor, types.
"""
