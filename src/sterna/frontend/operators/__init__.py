"""The routes under `/admin`: operators' questions to the actors of the cluster, orders, and the
frames of the dashboard.

Offers: admin_routes, questions, watchers.
Imports: dashboard, errors, frontend, frontend.http, frontend.requests, messages,
    migration.messages, priority_classes, types.
"""
