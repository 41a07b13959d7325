"""The administrators' routes under `/admin`: questions to the actors of the cluster, and orders.

Offers: admin_routes, questions.
Imports: errors, frontend, frontend.http, frontend.requests, messages, migration.messages,
    priority_classes, types.
"""
